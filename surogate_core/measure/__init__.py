"""A loaded model that is measured, and the standard errors of its figures."""
