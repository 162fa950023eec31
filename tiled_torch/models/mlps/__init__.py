"""MLPs that are found by their structure, and by what a probe of their own code shows."""
