"""Draft and verification messages between machines: gRPC, package `penstock.v1`."""
