"""The linear algebra of a chunk: typed dots, a triangular inverse, the carry.

Each has its own derivative rule, because autodiff would keep float32 operands in
bfloat16 training (no tensor cores) and every partial result of the inverse.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Diagonal blocks up to this size are inverted under a mask instead of by slices:
# smaller dots than 16 x 16 gain nothing.
_BASE = 16


def einsum(spec: str, a: Array, b: Array, dtype: jnp.dtype, out: jnp.dtype) -> Array:
    """Contract operands rounded to `dtype`, accumulate wide, return `out`.

    The gradient uses the same operand type: the cotangent is rounded too.
    """
    return _einsum(spec, jnp.dtype(dtype), jnp.dtype(out), a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _einsum(spec: str, dtype: jnp.dtype, out: jnp.dtype, a: Array, b: Array) -> Array:
    return _dot(spec, a.astype(dtype), b.astype(dtype)).astype(out)


def _dot(spec: str, a: Array, b: Array) -> Array:
    low = a.dtype == jnp.bfloat16
    return jnp.einsum(
        spec,
        a,
        b,
        precision=lax.Precision.DEFAULT if low else lax.Precision.HIGHEST,
        preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
    )


def _einsum_forward(
    spec: str, dtype: jnp.dtype, out: jnp.dtype, a: Array, b: Array
) -> tuple[Array, tuple]:
    # Scalars remember the operands' own types, which the gradients take.
    types = (jnp.zeros((), a.dtype), jnp.zeros((), b.dtype))
    a, b = a.astype(dtype), b.astype(dtype)
    return _dot(spec, a, b).astype(out), (a, b, *types)


def _einsum_backward(
    spec: str,
    dtype: jnp.dtype,
    out: jnp.dtype,
    kept: tuple,
    gradient: Array,
) -> tuple[Array, Array]:
    del out
    a, b, type_a, type_b = kept
    operands, result = spec.split("->")
    left, right = operands.split(",")
    gradient = gradient.astype(dtype)
    grad_a = _dot(f"{result},{right}->{left}", gradient, b)
    grad_b = _dot(f"{left},{result}->{right}", a, gradient)
    return grad_a.astype(type_a.dtype), grad_b.astype(type_b.dtype)


_einsum.defvjp(_einsum_forward, _einsum_backward)


@jax.custom_vjp
def unit_lower_inverse(lower: Float[Array, "*H C C"]) -> Float[Array, "*H C C"]:
    """Invert I + L for strictly lower L (C a power of two) by block doubling.

    Two inverted diagonal blocks A, B and the block O below A give the inverse of
    twice the size: [[A, 0], [-B O A, B]]. Unlike the product (I-L)(I+L^2)... no
    powers of L appear, which for correlated keys grow like binomials and cancel.
    """
    size = lower.shape[-1]
    base = min(size, _BASE)
    blocks = [_diagonal(lower, i * base, base) for i in range(size // base)]
    inverse = _invert_base(jnp.stack(blocks, axis=-3))
    while inverse.shape[-1] < size:
        inverse = _join(inverse, lower)
    return inverse[..., 0, :, :]


def _diagonal(matrix: Array, start: int, size: int) -> Array:
    return matrix[..., start : start + size, start : start + size]


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _invert_base(lower: Array) -> Array:
    """Double inside small blocks, the off-diagonal block picked by a mask."""
    size = lower.shape[-1]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    width = 1
    while width < size:
        pair = row // (2 * width) == column // (2 * width)
        below = pair & (row // width > column // width)
        off = jnp.where(below, lower, 0)
        # The first step's inverse is the identity: no dot is needed.
        fix = off if width == 1 else _matmul(_matmul(inverse, off), inverse)
        inverse = inverse - fix
        width *= 2
    return inverse


def _join(inverse: Array, lower: Array) -> Array:
    """Join neighbouring inverted blocks [..., 2 m, w, w] to [..., m, 2w, 2w]."""
    count, width = inverse.shape[-3], inverse.shape[-1]
    off = [
        lower[..., s + width : s + 2 * width, s : s + width]
        for s in range(0, count * width, 2 * width)
    ]
    first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
    corner = -_matmul(_matmul(second, jnp.stack(off, axis=-3)), first)
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    bottom = jnp.concatenate([corner, second], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)


def _inverse_forward(lower: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    turned = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_matmul(_matmul(turned, gradient), turned), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


@jax.custom_vjp
def carry(
    decay: Float[Array, "N *H"],
    erase: Float[Array, "N *H Dk Dk"],
    write: Float[Array, "N *H Dv Dk"],
    state: Float[Array, "*H Dv Dk"],
) -> tuple[Float[Array, "N *H Dv Dk"], Float[Array, "*H Dv Dk"]]:
    """Run S <- decay S - S erase + write over the chunks, the only sequential part.

    Returns the state before each chunk in `erase`'s dtype (the operand type of
    the dots that read it), and the last state in the accumulator's.
    """

    def step(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        scale, erase, write = inputs
        read = state.astype(erase.dtype)
        erased = _dot("...vk,...kl->...vl", read, erase)
        return scale[..., None, None] * state - erased + write, read

    last, before = lax.scan(step, state, (decay, erase, write))
    return before, last


def _carry_forward(
    decay: Array, erase: Array, write: Array, state: Array
) -> tuple[tuple[Array, Array], tuple]:
    before, last = carry(decay, erase, write, state)
    # The scalar remembers the type of `write`.
    return (before, last), (decay, erase, before, jnp.zeros((), write.dtype))


def _carry_backward(kept: tuple, gradients: tuple[Array, Array]) -> tuple[Array, ...]:
    decay, erase, before, write_type = kept
    grad_before, grad_last = gradients

    def step(grad: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        scale, erase, local = inputs
        low = grad.astype(erase.dtype)
        through = _dot("...vl,...kl->...vk", low, erase)
        return scale[..., None, None] * grad - through + local, grad

    grad_state, after = lax.scan(
        step, grad_last, (decay, erase, grad_before), reverse=True
    )
    grad_erase = -_dot("...vk,...vl->...kl", before, after.astype(before.dtype))
    grad_decay = jnp.sum(before.astype(after.dtype) * after, axis=(-2, -1))
    return (
        grad_decay,
        grad_erase.astype(erase.dtype),
        after.astype(write_type.dtype),
        grad_state,
    )


carry.defvjp(_carry_forward, _carry_backward)
