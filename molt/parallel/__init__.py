"""Devices, process groups and the mesh that parameters are sharded over."""
