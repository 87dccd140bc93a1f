"""Pages made from plain data by jinja2 templates: each is one self-contained HTML file."""
