"""Which requests may use anything below the GPU, and a manager that keeps the others out.

A request's salt and adapter are known to a connector only: no spec, manager or tier of vLLM sees
them. `require_salt` and `persist_lora` of ``kv_connector_extra_config`` therefore need
:class:`kvstrata.vllm.connector.KVStrataConnector`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult, PrepareStoreOutput
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

import kvstrata

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

SALT_OPTION = "require_salt"
LORA_OPTION = "persist_lora"
BY_NAME = "name"
STRICT = "strict"


@dataclass(frozen=True)
class Admission:
    """The rules. An adapter's name is in every key; its version is only where a salt names it."""

    require_salt: bool = False
    strict_adapters: bool = False

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> Admission:
        """Read the options.

        # Errors
        :class:`kvstrata.ConfigError` naming one that is not what it can be.
        """
        salt = extra_config.get(SALT_OPTION, False)
        if not isinstance(salt, bool):
            msg = f"{SALT_OPTION!r} is {salt!r}, not true or false"
            raise kvstrata.ConfigError(msg)
        lora = extra_config.get(LORA_OPTION, BY_NAME)
        if lora not in {BY_NAME, STRICT}:
            msg = f"{LORA_OPTION!r} is {lora!r}, not {BY_NAME!r} or {STRICT!r}"
            raise kvstrata.ConfigError(msg)
        return cls(salt, lora == STRICT)

    @property
    def refuses_any(self) -> bool:
        """Whether some request is kept out."""
        return self.require_salt or self.strict_adapters

    def admits(self, request: Any) -> bool:
        """Whether a request of vLLM's may load from and store below the GPU."""
        if getattr(request, "cache_salt", None):
            return True
        adapter = getattr(request, "lora_request", None) is not None
        return not (self.require_salt or (self.strict_adapters and adapter))


class _Refused:
    """What the context of a refused request has among its state."""


def is_refused(req_context: ReqContext) -> bool:
    """Whether the request of this context is kept out."""
    return req_context.get_state(_Refused) is not None


class AdmittingManager:
    """A manager in front of vLLM's: requests that are refused find nothing and store nothing.

    A refusal is kept in the request's own context: an id may be given again while the scheduler
    still has something to say of the request that had it before.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        # Refused before there was a context.
        self._coming: set[str] = set()

    def refuse(self, req_id: str) -> None:
        """Keep the request of this id out that is about to begin."""
        self._coming.add(req_id)

    def on_new_request(self, req_context: ReqContext) -> Any:
        """Begin a request; mark one that is refused."""
        if req_context.req_id in self._coming:
            self._coming.discard(req_context.req_id)
            req_context.set_state(_Refused())
        return self.manager.on_new_request(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """A miss for a refused request."""
        if is_refused(req_context):
            return LookupResult.MISS
        return self.manager.lookup(key, req_context)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Any:
        """Nothing to store for a refused request."""
        if is_refused(req_context):
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        return self.manager.prepare_store(keys, req_context)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the manager's own."""
        return getattr(self.manager, name)
