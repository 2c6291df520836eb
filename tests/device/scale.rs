//! What is large: inputs beyond the range of a half, and tensors beyond what a device binds.

use cmf_gpu::Kind;
use cmf_gpu::container::{Arch, Container, TensorId, TensorInfo, Tensors};
use cmf_gpu::dtype::{Dtype, Size};
use cmf_gpu::gpu::GpuExecutor;
use cmf_gpu::host::HostExecutor;
use cmf_gpu::kernel::Kv;
use cmf_gpu::model::bind;
use cmf_gpu::parity;
use cmf_gpu::program::{Ctl, Executor, ExpertOptions, Extent, Plan, PlanOptions, Which, plan};
use std::sync::Arc;

/// Residual streams reach millions; whatever is staged as a half on the way becomes infinite.
#[test]
fn loud_inputs_are_computed_as_precisely_as_others() {
    let device = crate::device();
    for dtype in Dtype::all().map(Dtype::name) {
        for kind in ["matvec", "matmul"] {
            let case = crate::case(&format!("{kind}.{dtype} 5x96 bias"));
            for factor in [3e3, 7e4, 3e6] {
                let mut rig = case.rig(device.max_binding()).unwrap();
                let x = rig.plan.buffers.iter().position(|buffer| buffer.label == "x").unwrap();
                let inputs = rig.rounds.iter_mut().flat_map(|round| &mut round.inputs);
                let words = inputs.filter(|(buffer, _)| *buffer == x).flat_map(|(_, words)| words);
                let mut count = 0;
                for word in words {
                    *word = (f32::from_bits(*word) * factor).to_bits();
                    count += 1;
                }
                assert!(count > 0);
                let error = parity::compare(&device, &rig, &rig, case.tolerance()).unwrap();
                assert!(error.is_ok(), "{} times {factor}: {error:?}", case.name());
            }
        }
    }
}

/// A network of one layer that exists by name only.
struct Named(Vec<TensorInfo>);

impl Tensors for Named {
    fn infos(&self) -> &[TensorInfo] {
        &self.0
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.0.iter().position(|info| info.name == name)
    }

    fn bytes(&self, _: TensorId) -> cmf_gpu::Result<&[u8]> {
        Err(cmf_gpu::Error::new(cmf_gpu::Kind::Io, "there are no bytes"))
    }

    fn release(&self, _: TensorId) {}
}

const VOCAB: usize = 248_320;
const HIDDEN: usize = 5120;

/// A vocabulary of 5 GB in `dtype`, and a layer to go with it.
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
            offset: 0,
            nbytes,
            hash: 0,
            shard: 0,
        }
    };
    (arch, Named(shapes.map(info).into()))
}

fn planned(dtype: Dtype, max_binding: u64) -> cmf_gpu::Result<Plan> {
    let (arch, tensors) = huge(dtype);
    let options = PlanOptions {
        ctx: 64,
        chunk: 8,
        kv: Kv::F16,
        max_binding,
        all_logits: false,
        drafts: 0,
        experts: ExpertOptions::default(),
    };
    plan(&bind(&arch, &tensors)?, &tensors, &options)
}

/// A table larger than a device binds, or than 32 bits count, is bound all the same.
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
        for matrix in &plan.matrices {
            let mut next = 0;
            for segment in &matrix.segments {
                let planes = [segment.geometry.code_bytes(), segment.geometry.scale_bytes()];
                assert!(
                    planes.iter().all(|&bytes| bytes as u64 <= max_binding),
                    "{}",
                    matrix.label
                );
                assert_eq!(segment.row0 as usize, next, "{}", matrix.label);
                // Gate and up are stored as a pair of rows an output.
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

/// What does not fit even in pieces fails on the device, or without a name.
#[test]
fn rows_too_long_for_a_binding_are_refused_by_name() {
    // 32 rows of 17,408 floats are more than that.
    let err = planned(Dtype::F32, 2 << 20).unwrap_err();
    assert_eq!(err.kind, cmf_gpu::Kind::OutOfMemory, "{err}");
    let said = ["32 rows of layer.00.ffn.down", "2097152 bytes"];
    assert!(said.iter().all(|part| err.message.contains(part)), "{err}");
}

/// A plan of a small network whose chunks attend over so many positions.
fn long(ctx: u32) -> (Arc<Container>, Arc<Plan>) {
    let (container, _guard) = crate::golden("qwen3", Dtype::F16);
    let options = PlanOptions {
        ctx,
        chunk: 8,
        kv: Kv::F32,
        max_binding: crate::device().max_binding(),
        all_logits: false,
        drafts: 0,
        experts: ExpertOptions::default(),
    };
    let plan = crate::plan_of(&container, &options);
    (container, plan)
}

/// Drivers that end loops early are found out, and contexts too long for them are refused before anything is made.
#[test]
fn a_context_too_long_for_the_drivers_loops_is_refused() {
    let device = crate::device();
    // Mesa's ends them after 65,535 steps; SwiftShader's does not.
    let is_mesa = device.name.contains("llvmpipe");
    assert_eq!(device.steps_of_loops(), is_mesa.then_some(65_535), "{}", device.name);
    for (ctx, is_long) in [(4096, false), (16_384, false), (32_768, true), (65_536, true)] {
        let (container, plan) = long(ctx);
        let made = GpuExecutor::new(device.clone(), plan, &*container, &mut |_, _| Ok(()));
        match made {
            Ok(_) => assert!(!is_mesa || !is_long, "{ctx}"),
            Err(err) => {
                assert!(err.kind == Kind::DeviceError && err.message.contains("--ctx"), "{err}");
                assert!(is_mesa && is_long, "{ctx}: {err}");
            }
        }
    }
}

/// So the plan does not count fewer steps than a chunk's attention takes.
#[test]
fn the_longest_context_that_is_not_refused_is_right() {
    let device = crate::device();
    let of_block = long(64).1.loop_steps();
    let most = device.steps_of_loops().unwrap_or(65_535);
    let ctx = (u64::from(most) / of_block * 64) as u32;
    let (container, plan) = long(ctx);
    assert!(plan.loop_steps() <= u64::from(most) && long(ctx + 1).1.loop_steps() > u64::from(most));
    let on_device = GpuExecutor::new(device, plan.clone(), &*container, &mut |_, _| Ok(())).unwrap();
    let on_host = HostExecutor::new(plan.clone(), container).unwrap();
    let executors: [Box<dyn Executor>; 2] = [Box::new(on_device), Box::new(on_host)];
    let [found, wanted] = executors.map(|mut executor| {
        // The last block's values are the loudest: without it everything is different.
        for (i, buffer) in plan.buffers.iter().enumerate() {
            let is_value = buffer.label.ends_with("v_cache");
            if is_value || buffer.label.ends_with("k_cache") {
                let elements = buffer.bytes as u32 / 4;
                let position = |element: u32| element / 64 % ctx;
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
        let ctl = Ctl {
            pos: ctx - 8,
            columns: 8,
            last: ctx,
            ..Ctl::default()
        };
        executor.write(plan.fixed.tokens, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        executor.write(plan.fixed.ctl, bytemuck::cast_slice(&[ctl])).unwrap();
        let ticket = executor
            .submit(Which::Prefill, Extent { columns: 8, end: ctx })
            .unwrap();
        executor.wait(ticket).unwrap();
        let stream = *plan.program(Which::Prefill).hidden.last().unwrap();
        let words = executor.read(stream, 0, 8 * plan.hidden as usize).unwrap();
        vec![words.into_iter().map(f32::from_bits).collect::<Vec<f32>>()]
    });
    let apart = crate::masks::apart(&found, &wanted);
    assert!(apart < 1e-5, "{ctx} positions: {apart:e} apart");
}
