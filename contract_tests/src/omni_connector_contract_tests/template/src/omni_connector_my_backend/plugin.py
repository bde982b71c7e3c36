"""Registers the backend. Plain data: whoever lists the backends imports this module and no SDK."""

from omni_connector_core import BackendSpec, Capabilities, hookimpl

# What the backend can do beyond what all can. Each claim is tested, and so is its absence: claim what you have.
CAPABILITIES = Capabilities(
    cross_host=False,  # True for a store that processes on other hosts can reach
    zero_copy=False,  # True when `read` returns the store's own memory
    bounded=True,  # there is an option `capacity_bytes`, and it holds
)


@hookimpl
def omni_connector_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="my_backend",
        summary="Payloads in files of a folder",
        transport="omni_connector_my_backend.transport:MyBackendTransport",
        options="omni_connector_my_backend.options:MyBackendOptions",
        capabilities=CAPABILITIES,
        install="pip install omni-connector-my-backend",
        sdk=None,  # the import name of your SDK: a missing one is then an error that says `install`
        service=None,  # "module:function" that starts a daemon for tests and demos, if you need one
    )
