"""What slicedkv is compared with, and the workloads that both sides serve."""
