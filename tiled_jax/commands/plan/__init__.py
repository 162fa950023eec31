"""`plan --simulate`: the step of a plan compiled without its devices, its bytes counted."""
