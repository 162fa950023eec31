"""The equations of a traced program: what they make on the way, without what only its last results need."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

Atom = Any  # a variable of a program, or a literal in it
_CALLS = ("jit", "pjit", "closed_call")


class Equations:
    """The equations of one jaxpr and the values known of it. Calls of `jit` in it can be entered: they have their own.

    A value is computed once, when it is asked for. An equation that nothing asked for needs runs only if it has effects.
    """

    def __init__(self, closed: Any, args: Sequence[Any] = (), caller: "tuple[Equations, Any] | None" = None) -> None:
        """args: values of the inputs; they are asked for where an equation of another program calls this one."""
        self.jaxpr, self._caller = closed.jaxpr, caller
        self._makers = {variable: equation for equation in self.jaxpr.eqns for variable in equation.outvars}
        self._inputs = {variable: place for place, variable in enumerate(self.jaxpr.invars)}
        self._inside: dict[int, Equations] = {}
        self._ran: set[int] = set()
        self._values: dict[Any, Any] = dict(zip(self.jaxpr.constvars, closed.consts, strict=True))
        if caller is None:
            self._values |= dict(zip(self.jaxpr.invars, args, strict=True))

    def origin(self, atom: Atom) -> "tuple[Equations, Atom, Any]":
        """Return where a value is made, through calls of `jit`: these equations or others, its name there, and the equation.

        The equation is None for an input, a constant and a literal.
        """
        program = self
        while isinstance(atom, core.Var):
            if atom in program._inputs and program._caller is not None:
                outer, call = program._caller
                program, atom = outer, call.invars[program._inputs[atom]]
                continue
            equation = program._makers.get(atom)
            if equation is None or equation.primitive.name not in _CALLS:
                return program, atom, equation
            place = equation.outvars.index(atom)
            program = program._entered(equation)
            atom = program.jaxpr.outvars[place]
        return program, atom, None

    def values(self, atoms: Sequence[Atom]) -> list[Any]:
        """Return what the equations make of the inputs."""
        self._compute([atom for atom in atoms if isinstance(atom, core.Var)])
        return [atom.val if isinstance(atom, core.Literal) else self._values[atom] for atom in atoms]

    def _entered(self, equation: Any) -> "Equations":
        if id(equation) not in self._inside:
            self._inside[id(equation)] = Equations(equation.params["jaxpr"], caller=(self, equation))
        return self._inside[id(equation)]

    def _compute(self, wanted: Sequence[Any]) -> None:
        needed, run = {variable for variable in wanted if variable not in self._values}, []
        for equation in reversed(self.jaxpr.eqns):
            asked = any(variable in needed for variable in equation.outvars)
            if asked or (equation.effects and id(equation) not in self._ran):
                run.append(equation)
                needed |= {a for a in equation.invars if isinstance(a, core.Var) and a not in self._values}
        given = [variable for variable in needed if variable in self._inputs]
        if given and self._caller is not None:
            outer, call = self._caller
            found = outer.values([call.invars[self._inputs[variable]] for variable in given])
            self._values |= dict(zip(given, found, strict=True))
        self._ran |= {id(equation) for equation in run}
        for equation in reversed(run):
            if id(equation) in self._inside:
                places = [place for place, variable in enumerate(equation.outvars) if variable in needed]
                inside = self._inside[id(equation)]
                found = inside.values([inside.jaxpr.outvars[place] for place in places])
                self._values |= dict(zip([equation.outvars[place] for place in places], found, strict=True))
                continue
            with equation.ctx.manager:
                bound = equation.primitive.get_bind_params(equation.params)
                results = equation.primitive.bind(*self.values(equation.invars), **bound)
            results = results if equation.primitive.multiple_results else [results]
            self._values |= dict(zip(equation.outvars, results, strict=True))
