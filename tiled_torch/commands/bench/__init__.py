"""`bench`: one operation against its plain form and against peers, on a CPU."""
