"""Several ranks: who has what, what travels, what ranks must agree on."""
