"""Messages of `penstock.v1`, generated from `drafting.proto`."""
