"""Names of other libraries, over this one: change the import and keep the code. docs/migrating.md says what differs."""
