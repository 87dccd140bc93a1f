"""Pages made from plain data by jinja2 templates: each is one HTML file that loads nothing."""
