"""Charts as SVG, for reports and other pages of figures: no script, no outside asset."""
