"""Draft and verify messages between machines: gRPC, package `penstock.v1`."""
