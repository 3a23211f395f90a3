"""Frida's Interceptor with a CModule, its fastest way of hooking a function: native code that sums the arguments up."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.peers import Hits, change_of
from tests.symbols import function, runtime_address
from tests.targets import Target

# The counters are outside the CModule, whose own data cannot be written.
_SCRIPT = """
const counts = Memory.alloc(3 * 8);
const module = new CModule(`
#include <gum/guminterceptor.h>
extern gsize counts[3];
void onEnter (GumInvocationContext * ic)
{
  counts[0]++;
  counts[1] += (gsize) gum_invocation_context_get_nth_argument (ic, 0);
  counts[2] += (gsize) gum_invocation_context_get_nth_argument (ic, 1);
}
`, { counts });
rpc.exports = {
  hook(addresses) {
    for (const address of addresses)
      Interceptor.attach(ptr(address), { onEnter: module.onEnter });
    Interceptor.flush();
  },
  hits() { return counts.readU64().toNumber(); }
};
"""


class Frida:
    name = "frida"

    def missing(self) -> str:
        return "" if importlib.util.find_spec("frida") else "not installed (pip install frida)"

    @contextmanager
    def attached(self, target: Target, binary: Path, functions: list[str]) -> Iterator[Hits]:
        frida = importlib.import_module("frida")
        session = frida.attach(target.pid)
        try:
            script = session.create_script(_SCRIPT)
            script.load()
            sites = [runtime_address(target.pid, binary, function(binary, name)[0]) for name in functions]
            changed = change_of(target, binary, functions)
            script.exports_sync.hook([hex(site) for site in sites])
            changed()
            yield lambda: int(script.exports_sync.hits())
        finally:
            session.detach()
