"""Names and formats of the files that runs read and write."""
