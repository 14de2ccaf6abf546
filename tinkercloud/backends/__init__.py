"""Backends by name; the class is imported when one is chosen."""

BACKENDS = {
    "cluster": "tinkercloud.cluster.backend:ClusterBackend",
    "embedded": "tinkercloud.embedded.backend:EmbeddedBackend",
    "fake": "tinkercloud.backends.fake:FakeBackend",
}
