"""What becomes of other frameworks' arguments: tables as data, one file per framework."""
