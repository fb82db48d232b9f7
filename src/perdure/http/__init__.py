"""The HTTP surface: the app, its middleware, and one package for each wire protocol."""
