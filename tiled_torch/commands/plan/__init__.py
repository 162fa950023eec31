"""`plan --simulate`: the step of a plan run without a device, its bytes counted."""
