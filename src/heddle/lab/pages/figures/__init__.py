"""The figures of a comparison's page as plotly specifications: plain data, drawn by static/figures.js."""
