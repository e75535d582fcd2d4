"""The OpenAPI document of all routes, and the page that shows it."""
