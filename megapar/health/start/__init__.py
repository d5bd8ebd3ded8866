"""The comparison of what ranks are started with."""
