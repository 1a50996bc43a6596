"""Which implementation of `verify` runs a call, how it is cut, and what is refused."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.tree_verify import config as configs
from pallas_kernels.tree_verify import spec as specs
from tests.treewy_jax import strategies
from treewy_jax import verify


class TestArguments:
    @staticmethod
    def arguments():
        cases = [strategies.make_case([-1, 0, 0], seed) for seed in range(2)]
        return list(strategies.batch(cases, 16))

    @pytest.mark.parametrize("position", range(6))
    def test_a_wrong_shape_names_the_argument(self, position):
        names = ("q", "k", "v", "log_decay", "beta", "state")
        arguments = self.arguments()
        arguments[position] = arguments[position][:, :-1]
        with pytest.raises(ValueError, match=rf"\b{names[position]} has shape"):
            verify.verify(*arguments)

    def test_other_wrong_arguments(self):
        arguments = self.arguments()
        with pytest.raises(ValueError, match="k has dtype int32"):
            verify.verify(arguments[0], arguments[1].astype(int), *arguments[2:])
        with pytest.raises(ValueError, match="tree is a list"):
            verify.verify(*arguments[:-1], [-1, 0, 0])
        with pytest.raises(ValueError, match="k has shape"):
            verify.verify(arguments[0], arguments[1][..., 0], *arguments[2:])
        with pytest.raises(ValueError, match="multiple of the 4 key heads"):
            case = strategies.make_case([-1], heads=(4, 6))
            verify.verify(*strategies.batch([case], 1))

    def test_unknown_names_list_what_is_allowed(self):
        arguments = self.arguments()
        with pytest.raises(
            ValueError, match="impl is 'cuda'; allowed: auto, mosaic_gpu, triton"
        ):
            verify.verify(*arguments, impl="cuda")
        with pytest.raises(ValueError, match="precision is 'low'; allowed: high, fast"):
            verify.verify(*arguments, precision="low")
        with pytest.raises(ValueError, match="output_dtype is int32"):
            verify.verify(*arguments, output_dtype=jnp.int32)


class TestChoice:
    spec = staticmethod(
        functools.partial(
            specs.make_spec,
            nodes=40,
            key_heads=16,
            value_heads=32,
            key_dim=128,
            value_dim=128,
        )
    )

    def test_auto_never_fails_and_says_why(self):
        spec = self.spec(key_dim=24)
        assert verify.choose(spec).name == "reference"
        line = verify.explain(spec, "auto")
        assert "impl=reference" in line and "mosaic_gpu needs" in line
        assert "triton needs" in line and "mosaic_tpu needs" in line
        assert "\n" not in line

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"key_dim": 24}, "key_dim to be a power of two"),
            ({"value_dim": 8}, "value_dim to be a power of two"),
            ({"nodes": 129}, "at most 128 nodes"),
            ({"accumulation_dtype": "float64"}, "not float64"),
            ({"input_dtype": "float16"}, "not input dtype float16"),
        ],
    )
    def test_a_named_one_raises_with_the_reason(self, change, reason):
        with pytest.raises(NotImplementedError, match=reason):
            verify.choose(self.spec(**change), "triton")

    @pytest.mark.parametrize(
        ("kind", "platform", "expected"),
        [
            ("NVIDIA H200", "cuda", "mosaic_gpu"),
            ("NVIDIA B200", "cuda", "triton"),
            ("TPU v5 lite", "tpu", "mosaic_tpu"),
        ],
    )
    def test_the_device_compiled_for_decides(self, kind, platform, expected):
        device = jax.sharding.AbstractDevice(kind, 1, platform)
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            assert verify.choose(self.spec()).name == expected
            other = "triton" if expected == "mosaic_tpu" else "mosaic_tpu"
            with pytest.raises(NotImplementedError, match="the device is a"):
                verify.choose(self.spec(), other)

    def test_precision_follows_the_output(self):
        assert self.spec(output_dtype="bfloat16").precision == "fast"
        assert self.spec(input_dtype="bfloat16").precision == "fast"
        assert self.spec(input_dtype="bfloat16", output_dtype="float32").precision == (
            "high"
        )

    def test_the_state_is_counted_once(self):
        spec = self.spec(batch=3)
        state = 3 * 32 * 128 * 128 * 4
        halved = self.spec(batch=3, state_dtype="bfloat16")
        assert spec.bytes_moved - halved.bytes_moved == state // 2
        assert spec.flops == 3 * (
            4 * 40**2 * 128 * 16 + 4 * 40 * 128**2 * 32 + 8 * 40**2 * 128 * 32
        )


class TestConfig:
    def test_explicit_then_tuned_then_heuristic(self, tmp_path, monkeypatch):
        spec = TestChoice.spec()
        monkeypatch.setattr(configs, "TUNED", pathlib.Path(tmp_path))
        guess = configs.choose(spec, "gpu", "NVIDIA H200")
        assert guess == configs.heuristic(spec, "gpu")
        (tmp_path / "nvidia_h100.json").write_text(
            '[{"match": {"nodes": 4}, "config": {"block_v": 128}},'
            ' {"match": {"nodes": 40}, "config": {"block_v": 16, "num_warps": 8}}]'
        )
        tuned = configs.choose(spec, "gpu", "NVIDIA H100")
        assert tuned == configs.Config(block_v=16, num_warps=8)
        explicit = configs.Config(block_v=64)
        assert configs.choose(spec, "gpu", "NVIDIA H100", explicit) == explicit
        with pytest.raises(ValueError, match="block_v is 48"):
            configs.choose(spec, "gpu", "NVIDIA H100", configs.Config(block_v=48))
