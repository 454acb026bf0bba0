"""Tunable: the declaration that authors construct. It checks itself and can be launched."""

from __future__ import annotations

from dataclasses import dataclass
from pickle import PicklingError
from typing import Any

from aot_tune.declare.blanks import blank_mistakes, refuse_blanks
from aot_tune.declare.checks import check_calls, check_fields
from aot_tune.declare.declaration import Declaration
from aot_tune.nvidia import nvml
from aot_tune.serve.launch.dispatch import attach
from aot_tune.serve.loader import has_table
from aot_tune.values.config import Config


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Tunable(Declaration):
    """A cuTile kernel's declaration with its tables: `launch` runs the kernel with its tuned config.

    The constructor checks its fields and reads its tables for the GPUs of this machine, without a CUDA
    context. Where they have no table it also checks what its functions return for the first typical problem.

    Raises:
        DeclarationError: The declaration contradicts itself; the message names what to write instead.
    """

    # The decorator is needed although no field is added: a dataclass's constructor calls `__post_init__` only
    # where the class had one when it was decorated.

    def __post_init__(self) -> None:
        nvml.ask_for_gpus()  # NVML answers while the declaration is checked
        check_fields(self)
        if blank_mistakes(self):
            return
        if not has_table(self):
            check_calls(self)
        try:
            attach(self)
        except Exception:
            check_calls(self)  # names the mistake, such as a default that raises
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the place, a module and the name: other processes import the declaration."""
        from aot_tune.declare.discovery import load, module_of  # 4 ms, which no serving process needs

        module = module_of(self)
        if module is None or load(module, self.name) is not self:
            raise PicklingError(
                f"{self.name} is found in no module by its name; pickle declarations that are globals of a "
                "module, or members of a list or dict that is one"
            )
        return load, (module, self.name)

    def __copy__(self) -> Tunable:
        """Return the declaration itself, as a copy of a function does."""
        return self

    def __deepcopy__(self, memo: object) -> Tunable:
        """Return the declaration itself."""
        return self

    def launch(self, *args: Any, config: Config | None = None, batch_invariant: bool | None = None) -> None:
        """Launch the kernel with its tuned config, on the current stream of the arguments' device.

        `aot_tune.serve.launch.dispatch.attach` replaces this with a function made for the declaration.

        Args:
            *args: The launch arguments: CUDA tensors, lists of them and scalars, as `problem` takes them.
                Other libraries' arrays become tensors of the same memory, by ``__dlpack__`` or
                ``__cuda_array_interface__``.
            config: Use this config instead of the tuned one.
            batch_invariant: Whether the sizes on the declaration's `batch_axes` may not influence the config,
                so that a row's bits are the same in any batch. None follows AOT_TUNE_BATCH_INVARIANT.

        Raises:
            LaunchError: An argument cannot be launched; the message names it and what to pass.
        """
        refuse_blanks(self)
        raise NotImplementedError  # pragma: no cover - attach() replaces it where no blank is left

    def config_for(self, *args: Any, batch_invariant: bool | None = None) -> Config:
        """Return the config that a launch of these arguments would use, without a launch or a search.

        A host function uses it to prepare what depends on the config, such as padding to a tile. Hand it to
        `launch` as ``config``, because the launch of an untuned problem might search and choose another
        config. A miss here counts as in `launch`: AOT_TUNE_ON_MISS=error and AOT_TUNE_RECORD hold.

        Args:
            *args: The launch arguments, as for `launch`.
            batch_invariant: As for `launch`.

        Raises:
            LaunchError: The arguments cannot be launched, or a size is 0, so that nothing would be launched.
        """
        refuse_blanks(self)
        raise NotImplementedError  # pragma: no cover - attach() replaces it where no blank is left
