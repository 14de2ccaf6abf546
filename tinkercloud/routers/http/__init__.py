"""Between HTTP and the routes: authentication, bodies within their limits, forms of errors."""
