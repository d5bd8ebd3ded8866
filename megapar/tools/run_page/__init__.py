"""The page of ``megapar report``: what its figures show, and the document that draws them in a browser."""
