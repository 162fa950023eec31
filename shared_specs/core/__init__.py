"""What any capability needs: checks, rounding, the longest shard within a budget."""
