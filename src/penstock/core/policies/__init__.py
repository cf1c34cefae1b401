"""What is decided by choice: one file a policy, in a folder for each kind."""
