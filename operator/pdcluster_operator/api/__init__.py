"""The API of PDCluster as users write it, one module per version."""
