"""The PDCluster API object and the pure plan that operator and `pdctl` share."""
