//! Large inputs, tensors and contexts: beyond the range of a half, the largest binding, and the loops that drivers allow.

use crate::PLACES;
use cmf_gpu::Kind;
use cmf_gpu::dtype::{Dtype, Size};
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::lm::{LowerOptions, Plan, ProgramKind};
use cmf_gpu::op::{KV_PAGE, Kv};
use cmf_gpu::parity;
use cmf_gpu::source::{Arch, TensorId, TensorInfo, Tensors};
use std::sync::Arc;

/// Residual streams reach millions, which become infinite in a half.
#[test]
fn loud_inputs_are_computed_as_precisely_as_others() {
    let device = crate::device();
    for dtype in Dtype::all() {
        let (dtype, cols) = (dtype.name(), 96usize.next_multiple_of(dtype.row_multiple()));
        for kind in ["matvec", "matmul"] {
            let case = crate::case(&format!("{kind}.{dtype} 5x{cols} bias"));
            for factor in [3e3, 7e4, 3e6] {
                let mut rig = case.rig(device.max_binding()).unwrap();
                let x = rig.buffer("x").unwrap();
                let inputs = rig.rounds.iter_mut().flat_map(|round| &mut round.inputs);
                let words = inputs.filter(|(buffer, _)| *buffer == x).flat_map(|(_, words)| words);
                let mut count = 0;
                for word in words {
                    *word = (f32::from_bits(*word) * factor).to_bits();
                    count += 1;
                }
                assert!(count > 0);
                let error = parity::compare(&device, &rig, &rig).unwrap();
                assert!(error.is_ok(), "{} times {factor}: {error:?}", case.name());
            }
        }
    }
}

/// The names and shapes of a network, without data.
struct Named(Vec<TensorInfo>);

impl Tensors for Named {
    fn infos(&self) -> &[TensorInfo] {
        &self.0
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.0.iter().position(|info| info.name == name)
    }

    fn stored(&self, _: TensorId) -> cmf_gpu::Result<cmf_gpu::source::Stored<'_>> {
        Err(cmf_gpu::Error::new(cmf_gpu::Kind::Io, "there are no bytes"))
    }

    fn release(&self, _: TensorId) {}
}

const VOCAB: usize = 248_320;
const HIDDEN: usize = 5120;

/// A network of one layer with a vocabulary of 5 GB in f32.
fn huge(dtype: Dtype) -> (Arch, Named) {
    let mut arch = crate::golden("llama_untied", Dtype::F16).0.header().arch.clone();
    (arch.hidden_size, arch.intermediate_size, arch.vocab_size) = (HIDDEN, 17_408, VOCAB);
    (arch.num_attention_heads, arch.num_kv_heads, arch.head_dim) = (40, 8, 128);
    (arch.num_layers, arch.query_pre_attn_scalar) = (1, None);
    arch.layer_types.truncate(1);
    let shapes: [(&str, &[usize]); 12] = [
        ("model.embed_tokens", &[VOCAB, HIDDEN]),
        ("model.layers.0.input_layernorm", &[HIDDEN]),
        ("model.layers.0.self_attn.q_proj", &[5120, HIDDEN]),
        ("model.layers.0.self_attn.k_proj", &[1024, HIDDEN]),
        ("model.layers.0.self_attn.v_proj", &[1024, HIDDEN]),
        ("model.layers.0.self_attn.o_proj", &[HIDDEN, 5120]),
        ("model.layers.0.post_attention_layernorm", &[HIDDEN]),
        ("model.layers.0.mlp.gate_proj", &[17_408, HIDDEN]),
        ("model.layers.0.mlp.up_proj", &[17_408, HIDDEN]),
        ("model.layers.0.mlp.down_proj", &[HIDDEN, 17_408]),
        ("model.norm", &[HIDDEN]),
        ("lm_head", &[VOCAB, HIDDEN]),
    ];
    let info = |(name, shape): (&str, &[usize])| {
        let shape: Vec<u64> = shape.iter().map(|&side| side as u64).collect();
        let dtype = if shape.len() == 1 { Dtype::F32 } else { dtype };
        let Ok(Size::Exact(nbytes)) = dtype.size(&shape) else {
            panic!("{}", dtype.name())
        };
        TensorInfo {
            name: format!("{name}.weight"),
            dtype,
            shape,
            nbytes,
        }
    };
    (arch, Named(shapes.map(info).into()))
}

fn planned(dtype: Dtype, max_binding: u64) -> cmf_gpu::Result<Plan> {
    let (arch, tensors) = huge(dtype);
    let options = LowerOptions {
        chunk: 8,
        kv: Kv::F16,
        max_binding,
        ..crate::options(64)
    };
    crate::plan(&arch, &tensors, &options)
}

/// A table larger than the largest binding, or than 32 bits can count, is cut into segments.
#[test]
fn no_binding_is_larger_than_the_device_allows() {
    for (dtype, max_binding, least) in [
        (Dtype::F32, 128 << 20, 38),
        (Dtype::F32, (1 << 31) - 4, 3),
        (Dtype::Q8Row, 128 << 20, 10),
        (Dtype::Q4Block, (1 << 31) - 4, 1),
    ] {
        let plan = planned(dtype, max_binding).unwrap();
        let mut tables = 0;
        for matrix in &plan.graph.matrices {
            let mut next = 0;
            for segment in &matrix.segments {
                let planes = [segment.geometry.code_bytes(), segment.geometry.scale_bytes()];
                assert!(
                    planes.iter().all(|&bytes| bytes as u64 <= max_binding),
                    "{}",
                    matrix.label
                );
                assert_eq!(segment.row0 as usize, next, "{}", matrix.label);
                // Each output of gate and up has a pair of rows.
                let rows: usize = segment.runs.iter().map(|run| run.rows.len()).sum();
                let pair = matrix.label.contains("gate");
                next += if pair { rows / 2 } else { rows };
            }
            if next == VOCAB {
                tables += 1;
                assert!(matrix.segments.len() >= least, "{}", matrix.segments.len());
            }
        }
        assert_eq!(tables, 2);
    }
}

/// Guards against a failure on the device, or an error without a name.
#[test]
fn rows_too_long_for_a_binding_are_refused_by_name() {
    // 32 rows of 17,408 floats are more than that.
    let err = planned(Dtype::F32, 2 << 20).unwrap_err();
    assert_eq!(err.kind, cmf_gpu::Kind::OutOfMemory, "{err}");
    let said = ["layer.00.ffn.down: 32 rows", "2097152 bytes"];
    assert!(said.iter().all(|part| err.message.contains(part)), "{err}");
}

/// A small network, and its plan for so many positions.
fn long(ctx: u32) -> (Arc<CmfContainer>, Plan) {
    let (container, _guard) = crate::golden("qwen3", Dtype::F16);
    let options = LowerOptions {
        chunk: 8,
        ..crate::options(ctx)
    };
    let plan = crate::plan_of(&container, &options);
    (container, plan)
}

/// Guards against drivers that end loops early: contexts too long for them are refused before anything is created.
#[test]
fn a_context_too_long_for_the_drivers_loops_is_refused() {
    let device = crate::device();
    // Mesa's software driver ends them after 65,535 iterations; SwiftShader does not.
    let is_mesa = device.name.contains("llvmpipe");
    assert_eq!(device.loop_limit(), is_mesa.then_some(65_535), "{}", device.name);
    for (ctx, is_long) in [(4096, false), (65_536, false), (131_072, true), (262_144, true)] {
        let (container, plan) = long(ctx);
        match crate::upload(device.clone(), &plan, container) {
            Ok(_) => assert!(!is_mesa || !is_long, "{ctx}"),
            Err(err) => {
                assert!(
                    err.kind == Kind::DeviceError && err.message.contains("a shorter context would help"),
                    "{err}"
                );
                assert!(is_mesa && is_long, "{ctx}: {err}");
            }
        }
    }
}

/// Guards against a graph that counts fewer iterations than attention needs.
#[test]
fn the_longest_context_that_is_not_refused_is_right() {
    let device = crate::device();
    let of_block = long(64).1.graph.loop_steps();
    let most = device.loop_limit().unwrap_or(65_535);
    let ctx = (u64::from(most) / of_block * 64) as u32;
    let (container, plan) = long(ctx);
    assert!(plan.graph.loop_steps() <= u64::from(most) && long(ctx + 1).1.graph.loop_steps() > u64::from(most));
    let [found, wanted] = PLACES.map(|place| {
        let mut executor = crate::executor(place, &plan, container.clone());
        // The values of the last block are the largest, so results without it differ.
        for (i, buffer) in plan.graph.buffers.iter().enumerate() {
            let is_value = buffer.label.ends_with("v_cache");
            if is_value || buffer.label.ends_with("k_cache") {
                let elements = buffer.bytes as u32 / 4;
                // A page holds so many rows of 64 elements for each key-value head.
                let rows = KV_PAGE * container.header().arch.num_kv_heads as u32;
                let position = |element: u32| element / 64 / rows * KV_PAGE + element / 64 % KV_PAGE;
                let value = |element: u32| {
                    let any = (element.wrapping_mul(0x9E37_79B9) >> 8) as f32 / (1 << 23) as f32 - 1.0;
                    any * if is_value && position(element) + 64 > ctx {
                        100.0
                    } else {
                        1.0
                    }
                };
                let words: Vec<u32> = (0..elements).map(|element| value(element).to_bits()).collect();
                executor.write(i, &words).unwrap();
            }
        }
        let shape = crate::begin(&mut *executor, &plan, &[1, 2, 3, 4, 5, 6, 7, 8], ctx - 8);
        crate::run(&mut *executor, &plan, ProgramKind::Prefill, shape).unwrap();
        let (_, stream) = *plan.program(ProgramKind::Prefill).taps.last().unwrap();
        let words = executor.read(stream, 0, 8 * plan.hidden as usize).unwrap();
        vec![words.into_iter().map(f32::from_bits).collect::<Vec<f32>>()]
    });
    let apart = crate::masks::apart(&found, &wanted);
    assert!(apart < 1e-5, "{ctx} positions: {apart:e} apart");
}
