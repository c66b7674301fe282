"""Pages that people share: one HTML file each, whose charts plotly draws in the browser."""
