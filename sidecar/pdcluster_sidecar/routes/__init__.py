"""The HTTP paths of the sidecar."""
