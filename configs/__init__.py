"""Ready-made configurations, shipped with the package so that an installed user has them too."""
