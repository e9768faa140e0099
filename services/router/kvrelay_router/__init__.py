"""The router: takes requests over HTTP and decides which workers serve them."""
