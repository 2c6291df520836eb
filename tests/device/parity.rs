//! Compares the device with the host: every kernel, whole programs, and variants of kernels with each other, bit by
//! bit. Planted faults show that the comparison finds them.

use crate::{all_pass, case};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::gpu::{Device, DeviceOptions};
use cmf_gpu::graph::{Graph, Run, source};
use cmf_gpu::lm::run::Session;
use cmf_gpu::lm::{LowerOptions, Plan, ProgramKind};
use cmf_gpu::op::{Kernel, Kv, Op};
use cmf_gpu::parity::{self, Case, Rig};
use cmf_gpu::shader::Team;
use cmf_gpu::source::{MemoryTensors, TensorId, Tensors};
use std::sync::Arc;

fn silent(_: usize, _: usize, _: &str) -> cmf_gpu::Result<()> {
    Ok(())
}

#[test]
fn every_kernel_agrees_with_the_reference() {
    all_pass(&parity::kernels(&crate::device(), None, &mut silent).unwrap());
}

#[test]
fn a_filter_picks_cases_by_name() {
    let outcome = parity::kernels(&crate::device(), Some("attn_merge 9/3"), &mut silent).unwrap();
    all_pass(&outcome);
    assert!(outcome.worst.keys().eq(["attn_merge"]));
}

// Programs.

fn programs_of(name: &str, quant: Dtype, kv: Kv, drafts: u32) {
    let (tensors, _guard) = crate::golden(name, quant);
    let options = LowerOptions {
        // Prefill to position 54, decode past the end of the first attention block.
        chunk: 40,
        kv,
        all_logits: kv == Kv::F32,
        drafts,
        ..crate::options(120)
    };
    let plan = crate::plan_of(&tensors, &options);
    all_pass(&crate::compare_steps(&plan, tensors));
}

macro_rules! programs {
    ($($test:ident: $model:literal $quant:ident $kv:ident $($drafts:literal)?;)*) => {
        $(#[test] fn $test() { programs_of($model, Dtype::$quant, Kv::$kv, 0 $(+ $drafts)?); })*
    };
}
programs! {
    program_of_llama_tied_in_q8_row: "llama_tied" Q8Row F16;
    program_of_llama_untied_in_q4_block: "llama_untied" Q4Block F16;
    program_of_llama3_rope_in_q4tp: "llama3_rope" Q4tp F16;
    program_of_llama_bias_in_q4_tiled: "llama_bias" Q4Tiled F32;
    program_of_qwen2_in_q8_2f: "qwen2" Q82f F16;
    program_of_qwen3_in_bf16: "qwen3" Bf16 F32;
    program_of_qwen3_5_in_q8_2f: "qwen3_5" Q82f F16;
    program_of_qwen3_5_in_q4tp: "qwen3_5" Q4tp F32;
    program_of_qwen3_in_f32: "qwen3" F32 F16;
    speculative_steps_of_qwen3_mtp_in_q8_row: "qwen3_mtp" Q8Row F16 3;
    speculative_steps_of_qwen3_5_hub_in_q4_tiled: "qwen3_5_hub" Q4Tiled F32 1;
    speculative_steps_of_gemma2_in_f16: "gemma2" F16 F16 7;
}

// Variants give the same bits.

fn same_bits(base: &Arc<Device>, other: &Arc<Device>, wanted: impl Fn(&Case) -> bool) {
    let mut compared = 0;
    for case in parity::cases().iter().filter(|case| wanted(case)) {
        let outputs = |device: &Arc<Device>| {
            let rig = case.rig(device.max_binding()).unwrap();
            parity::outputs(device, &rig).unwrap()
        };
        assert!(outputs(base) == outputs(other), "{} differs", case.name());
        compared += 1;
    }
    assert!(compared > 0);
}

fn options() -> DeviceOptions {
    DeviceOptions::default()
}

#[test]
fn subgroups_and_workgroup_memory_give_the_same_bits() {
    let (base, tree) = (
        crate::device(),
        crate::open(DeviceOptions {
            force_tree: true,
            ..options()
        }),
    );
    assert_eq!(tree.team(), Team::Tree);
    assert_ne!(
        base.team(),
        Team::Tree,
        "the adapter has no subgroups of one size: nothing to compare"
    );
    let teams = ["matvec", "moe_glu", "moe_matvec", "moe_down"];
    same_bits(&base, &tree, |case| {
        teams.iter().any(|kernel| case.kind().starts_with(kernel))
    });
}

#[test]
fn checked_and_unchecked_shaders_give_the_same_bits() {
    let checked = crate::open(DeviceOptions {
        checked_shaders: true,
        ..options()
    });
    same_bits(&crate::device(), &checked, |_| true);
}

#[test]
fn both_decoders_of_halves_give_the_same_bits() {
    let exact = crate::open(DeviceOptions {
        force_exact_half: true,
        ..options()
    });
    // Where the driver's decoder is inexact, both devices use the other one, so the host has to agree as well.
    let outcome = parity::kernels(&exact, Some("subnormal"), &mut silent).unwrap();
    all_pass(&outcome);
    let halves = [
        "f16", "q8_row", "q8_2f", "q4_block", "q4_tiled", "q4tp", "q1", "q1s", "q1t", "vbit", "vbit_ro",
    ];
    same_bits(&crate::device(), &exact, |case| {
        let mut parts = case.kind().split('.').skip(1);
        parts.any(|part| halves.contains(&part)) && !case.kind().starts_with("attn")
    });
}

#[test]
fn segments_give_the_same_bits() {
    let cut = crate::open(DeviceOptions {
        max_segment: Some(1 << 20),
        ..options()
    });
    assert_eq!(cut.max_binding(), 1 << 20);
    let large = |case: &Case| case.name().contains("65539x");
    for case in parity::cases().iter().filter(|case| large(case)) {
        let segments = case.rig(cut.max_binding()).unwrap().graph.matrices[0].segments.len();
        assert!(segments > 1, "{} is not cut", case.name());
    }
    same_bits(&crate::device(), &cut, large);
}

#[test]
fn a_model_in_segments_gives_the_same_bits() {
    let (tensors, _guard) = crate::golden("llama_tied", Dtype::Q8Row);
    let logits = |device: Arc<Device>, segments_of_head: usize| {
        let options = LowerOptions {
            chunk: 8,
            kv: Kv::F16,
            max_binding: device.max_binding(),
            all_logits: true,
            ..crate::options(48)
        };
        let plan = crate::plan_of(&tensors, &options);
        assert_eq!(plan.graph.matrices[0].segments.len(), segments_of_head);
        let executor = crate::upload(device, &plan, tensors.clone()).unwrap();
        let mut session = Session::new(plan, Box::new(executor));
        let mut all = Vec::new();
        let tokens: Vec<u32> = (0..20).map(|i| i * 25 % 512).collect();
        let mut sink = |_: usize, logits: &[f32], _: &[Vec<f32>]| {
            all.extend(logits.iter().map(|v| v.to_bits()));
            Ok(())
        };
        session.logits(&tokens, 12, false, &mut sink).unwrap();
        assert_eq!(all.len(), 20 * 512);
        all
    };
    // 512 rows of 128 bytes.
    let cut = crate::open(DeviceOptions {
        max_segment: Some(24 << 10),
        ..options()
    });
    assert!(logits(crate::device(), 1) == logits(cut, 3));
}

/// Guards against loops over the capacity of overlays instead of their entries: the software driver ends loops early,
/// and sums would be incomplete.
#[test]
fn loops_do_not_depend_on_the_capacity_of_overlays() {
    let device = crate::device();
    for name in [
        "moe_matmul_glu.q1s 24x96 3 of 8",
        "moe_matmul.q1t 24x96 3 of 8 dense overlay",
        "moe_matmul_up.q1s 24x96 3 of 8",
        "moe_glu.q1t 24x96 3 of 8",
        "moe_down.q1s 24x96 3 of 8",
    ] {
        let case = case(name);
        let good = case.rig(device.max_binding()).unwrap();
        let mut larger = good.clone();
        let segment = &mut larger.graph.matrices[0].segments[0];
        for run in &mut segment.runs {
            run.capacity.words += 70_000;
            segment.geometry.amount.words += 70_000;
        }
        let result = parity::compare(&device, &larger, &good).unwrap();
        assert!(result.is_ok(), "{name}: {}", result.unwrap_err());
    }
}

// Planted faults.

/// The same tensors with one bit of one payload flipped.
fn flipped(tensors: &dyn Tensors, id: TensorId, byte: usize, bit: u32) -> Arc<dyn Tensors> {
    let all = tensors.infos().iter().enumerate().map(|(i, info)| {
        let mut payload = tensors.stored(i).unwrap().bytes.to_vec();
        if i == id {
            payload[byte] ^= 1 << bit;
        }
        (info.name.clone(), info.dtype, info.shape.clone(), payload)
    });
    Arc::new(MemoryTensors::new(all).unwrap())
}

fn refused(tried: &Rig, case: &Case) -> String {
    let device = crate::device();
    let good = case.rig(device.max_binding()).unwrap();
    match parity::compare(&device, tried, &good).unwrap() {
        Ok(error) => panic!("{}: a fault passed with error {error:e}", case.name()),
        Err(what) => what,
    }
}

#[test]
fn a_flipped_scale_bit_is_found() {
    // The lowest bit of one scale, where the format stores it; 5 rows of 96.
    let (rows, cols) = (5, 96);
    let weights = rows * cols;
    let groups = weights / 32;
    for (dtype, byte) in [
        ("q8_row", weights),
        ("q8_2f", weights),
        ("q8_2f", weights + 2 * rows),
        ("q4_block", groups * 16),
        ("q4_tiled", 0),
        ("q4tp", groups * 16),
        ("q4tp", groups * 16 + 2),
        ("q4tp", groups * 16 + 4 * rows),
        // Scales, signs, and the first value of an overlay, which follows its index.
        ("q1", 0),
        ("q1", 2),
        ("q1s", groups * 6 - 6),
        ("q1s", groups * 6 - 1),
        ("q1s", groups * 6 + 4 + 4),
        ("q1t", 9),
        ("q1t", groups * 9 + 4 * (rows + 1) + 2),
        // Scales, and the lowest bit of the last code.
        ("vbit", rows),
        ("vbit_ro", rows + 2 * groups - 2),
    ] {
        for stem in ["matvec", "matmul"] {
            let case = case(&format!("{stem}.{dtype} {rows}x{cols} bias"));
            let mut bad = case.rig(u64::MAX).unwrap();
            bad.tensors = flipped(&*bad.tensors, 0, byte, 0);
            let what = refused(&bad, &case);
            assert!(what.contains("y: relative error"), "{what}");
        }
    }
}

const ROWS: [&str; 9] = [
    "matvec.q8_row 33x96 norm bias",
    "matmul.f16 33x96 bias",
    "matvec_add.q4tp 33x96 bias",
    "matmul_add.bf16 33x96 bias",
    "matvec.vbit_ro 33x96 norm bias",
    "matmul.vbit 33x96 bias",
    "matmul_add.q1s 33x96 bias",
    "matvec_add.q1t 33x96 bias",
    "matmul_add.q1 33x96 bias",
];

#[test]
fn a_row_too_few_is_found() {
    for name in ROWS {
        let case = case(name);
        let mut bad = case.rig(u64::MAX).unwrap();
        match &mut bad.graph.programs[0].steps[0].op {
            Op::Matvec(p) => p.rows -= 1,
            Op::MatvecAdd(p) => p.rows -= 1,
            Op::Matmul(p) => p.rows -= 1,
            Op::MatmulAdd(p) => p.rows -= 1,
            other => panic!("{other:?}"),
        }
        refused(&bad, &case);
    }
}

#[test]
fn rows_off_by_one_are_found() {
    for name in ROWS {
        let case = case(name);
        let mut bad = case.rig(u64::MAX).unwrap();
        // Every row is read from where the next one is, the last from the first.
        let matrix = &mut bad.graph.matrices[0];
        let stored = bad.tensors.stored(matrix.parts[0]).unwrap();
        let source = source(matrix.planes, &stored).unwrap();
        let runs = &mut matrix.segments[0].runs;
        let rows = [1..runs[0].rows.end, 0..1];
        *runs = rows
            .map(|rows| Run {
                part: 0,
                capacity: source.amount(rows.clone()),
                rows,
            })
            .to_vec();
        refused(&bad, &case);
    }
}

#[test]
fn every_kernel_with_a_wrong_parameter_is_found() {
    let mut changed = std::collections::BTreeSet::new();
    for name in [
        "embed.q8_row 33x32",
        "zero_masked 96",
        "matvec.masked.q8_row 33x96 norm bias",
        "matvec_add.masked.q4tp 33x96",
        "matvec_glu.masked.q4_block 33+33x96 norm bias",
        "pre_norm 96",
        "norm 96",
        "add_norm 576",
        "cap 576 soft",
        "glu 576",
        "matvec.f16 1x32 norm",
        "matvec_add.f32 33x96 bias",
        "matvec_glu.q4_block 33+33x96 norm bias",
        "matmul.q4tp 130x576 bias",
        "matmul_add.q4tp 130x576 bias",
        "matmul_glu.q8_2f 5+5x96 bias gelu",
        "rope.f16 9/3 heads of 64, 64 turned norm",
        "attn_block.f16 9/3 heads of 64 window 100",
        "attn_merge 9/3 heads of 64 window 8",
        "attn_chunk.f32 9/3 heads of 64 softcap",
        "matmul.masked.q8_row 33x96 bias",
        "matmul_add.masked.q1s 33x96 bias",
        "matmul_glu.masked.q4tp 130+130x576",
        "attn_block.masked.f32 9/3 heads of 64 window 100",
        "attn_merge.masked 7/1 heads of 48 gate",
        "attn_chunk.masked.f16 4/4 heads of 128",
        "delta_net 2/6 heads of 20x12 taps 4 states 2",
        "moe_glu.q8_2f 24x96 3 of 8",
        "moe_matvec.q4_block 24x96 3 of 8 gated",
        "moe_down.q4tp 24x96 3 of 8",
        "moe_route 8 of 127",
        "moe_count 8 of 127",
        "moe_lists 8 of 127",
        "moe_matmul_glu.q4_tiled 24x96 3 of 8",
        "moe_matmul_up.q8_2f 24x96 3 of 8",
        "moe_matmul.q8_row 24x96 3 of 8",
        "moe_combine 4 of 60",
        "sample 257 spread",
        "last_token 96",
        "hadamard 640 by 128",
        "speculate_begin 3 drafts",
        "draft 257 spread",
        "norm_mod 96",
        "add_norm_mod 96",
        "rope_pairs 3/3 heads of 96",
        "attn_full 6/2 heads of 16",
        "conv.f16 70 of 64, 3x3 added",
        "channel_stats 32 in 8",
        "group_merge 32 in 8",
        "group_norm 32 in 8 silu",
        "copy_rows 96",
    ] {
        let case = case(name);
        let mut bad = case.rig(u64::MAX).unwrap();
        let step = &mut bad.graph.programs[0].steps[0];
        let (kernel, masked) = (step.op.kernel(), step.masked.is_some());
        match &mut step.op {
            // Masked.
            Op::MatvecAdd(p) if masked => p.rows -= 1,
            Op::Matmul(p) if masked => p.has_bias = 0,
            Op::MatmulGlu(p) if masked => p.gelu ^= 1,
            Op::AttnMerge(p) if masked => p.query_vectors /= 2,
            Op::AttnChunk(p) if masked => p.scale *= 1.001,
            Op::Embed(p) => p.multiplier *= 1.0 + 1e-5,
            Op::PreNorm(p) => p.vectors -= 1,
            Op::Norm(p) => p.eps *= 1.001,
            Op::AddNorm(p) => p.eps *= 1.001,
            Op::Hadamard(p) => p.block /= 2,
            Op::Cap(p) => p.cap *= 1.001,
            Op::Glu(p) => p.gelu = 1,
            Op::ZeroMasked(p) => p.vectors -= 1,
            Op::Matvec(p) => p.eps = 0.0,
            Op::MatvecAdd(p) => p.has_bias = 0,
            Op::MatvecGlu(p) => p.bias_up += 1,
            Op::Matmul(p) => p.groups -= 1,
            Op::MatmulAdd(p) => p.y_stride -= 1,
            Op::MatmulGlu(p) => p.gelu = 0,
            Op::Rope(p) => p.eps = 0.0,
            Op::AttnBlock(p) => p.window += 1,
            Op::AttnMerge(p) => p.window = 0,
            Op::AttnChunk(p) => p.softcap *= 1.001,
            Op::DeltaNet(p) => p.eps = 0.0,
            Op::MoeGlu(p) => p.placed -= 1,
            Op::MoeMatvec(p) => p.gated = 0,
            Op::MoeDown(p) => p.top_k -= 1,
            Op::MoeRoute(p) => p.shared_expert = 0,
            Op::MoeCount(p) => p.stride -= 1,
            Op::MoeLists(p) => p.tiles -= 1,
            Op::MoeMatmulGlu(p) => p.x_entries = 1,
            Op::MoeMatmulUp(p) => p.gelu = 1,
            Op::MoeMatmul(p) => p.y_stride -= 1,
            Op::MoeCombine(p) => p.top_k -= 1,
            Op::Sample(p) => p.vocab /= 2,
            Op::LastToken(p) => p.vectors -= 1,
            Op::SpeculateBegin(p) => p.depth += 1,
            Op::Draft(p) => p.number += 1,
            Op::NormMod(p) => p.centred = 1,
            Op::AddNormMod(p) => p.gate_at = p.scale_at,
            Op::RopePairs(p) => p.kv_heads -= 1,
            Op::AttnFull(p) => p.scale *= 1.001,
            Op::Conv(p) => p.adds = 0,
            Op::ChannelStats(p) => p.vectors -= 1,
            Op::GroupMerge(p) => p.groups /= 2,
            Op::GroupNorm(p) => p.silu = 0,
            Op::CopyRows(p) => p.first += 1,
        }
        changed.insert((kernel, masked));
        refused(&bad, &case);
    }
    let all = Kernel::ALL.iter().map(|&kernel| (kernel, false));
    let masked = Kernel::ALL.iter().filter(|kernel| kernel.spec().has_mask());
    assert_eq!(changed, all.chain(masked.map(|&kernel| (kernel, true))).collect());
}

#[test]
fn wrong_strides_between_tokens_are_found() {
    type Spoil = fn(&mut Op);
    let wrong: &[(&str, Spoil)] = &[
        ("moe_glu.q8_2f 24x96 3 of 8", |op| match op {
            Op::MoeGlu(p) => p.stride -= 4,
            _ => panic!("{op:?}"),
        }),
        ("moe_glu.q4tp 24x96 3 of 8", |op| match op {
            Op::MoeGlu(p) => p.shared_stride -= 32,
            _ => panic!("{op:?}"),
        }),
        ("moe_glu.f16 24x96 3 of 8", |op| match op {
            Op::MoeGlu(p) => p.routes_at -= 2,
            _ => panic!("{op:?}"),
        }),
        ("moe_matvec.q8_2f 24x96 3 of 8", |op| match op {
            Op::MoeMatvec(p) => p.stride -= 4,
            _ => panic!("{op:?}"),
        }),
        ("moe_matvec.f16 24x96 3 of 8", |op| match op {
            Op::MoeMatvec(p) => p.routes_at -= 2,
            _ => panic!("{op:?}"),
        }),
        ("moe_matvec.q4tp 24x96 3 of 8 gated, shared", |op| match op {
            Op::MoeMatvec(p) => p.y_stride -= 1,
            _ => panic!("{op:?}"),
        }),
        ("moe_down.q8_row 24x96 3 of 8", |op| match op {
            Op::MoeDown(p) => p.y_stride -= 1,
            _ => panic!("{op:?}"),
        }),
        ("matvec.masked.q8_row 33x96 norm bias", |op| match op {
            Op::Matvec(p) => p.y_stride -= 1,
            _ => panic!("{op:?}"),
        }),
        ("matvec_add.masked.q4tp 33x96", |op| match op {
            Op::MatvecAdd(p) => p.y_stride -= 1,
            _ => panic!("{op:?}"),
        }),
        ("matvec_glu.masked.q4_block 33+33x96 norm bias", |op| match op {
            Op::MatvecGlu(p) => p.y_stride -= 1,
            _ => panic!("{op:?}"),
        }),
    ];
    for (name, spoil) in wrong {
        let case = case(name);
        let mut bad = case.rig(u64::MAX).unwrap();
        spoil(&mut bad.graph.programs[0].steps[0].op);
        refused(&bad, &case);
    }
    // The experts of the last token are left out.
    for name in [
        "moe_glu.q8_row 24x96 3 of 8",
        "moe_matvec.q8_row 24x96 3 of 8",
        "moe_matvec.q8_row 24x96 3 of 8 gated, shared",
        "moe_down.q8_row 24x96 3 of 8",
    ] {
        let case = case(name);
        let mut bad = case.rig(u64::MAX).unwrap();
        bad.graph.programs[0].steps[0].width -= 1;
        refused(&bad, &case);
    }
}

#[test]
fn swapped_experts_are_found() {
    for name in [
        "moe_glu.q8_row 24x96 3 of 8",
        "moe_matvec.q4_tiled 24x96 3 of 8",
        "moe_down.f16 24x96 3 of 8",
        "moe_matmul_glu.q4tp 24x96 3 of 8",
        "moe_matmul_up.f32 24x96 3 of 8",
        "moe_matmul.q8_2f 24x96 3 of 8",
    ] {
        let case = case(name);
        let mut bad = case.rig(u64::MAX).unwrap();
        // The last two experts, with their own scales.
        let runs = &mut bad.graph.matrices[0].segments[0].runs;
        let last = runs.len() - 1;
        let (one, other) = (runs[last].part, runs[last - 1].part);
        bad.graph.matrices[0].parts.swap(one, other);
        refused(&bad, &case);
    }
}

#[test]
fn a_wrong_weight_in_a_model_is_found_by_the_name_of_its_step() {
    let (tensors, _guard) = crate::golden("llama_untied", Dtype::Q8Row);
    let options = LowerOptions {
        chunk: 8,
        kv: Kv::F16,
        ..crate::options(32)
    };
    let plan = crate::plan_of(&tensors, &options);
    let id = tensors.find("model.layers.1.mlp.down_proj.weight").unwrap();
    // The lowest bit of the first row's scale.
    let (rows, cols) = tensors.infos()[id].rows_cols();
    let reference = crate::subject(&plan, tensors.clone());
    let tried = crate::subject(&plan, flipped(&*tensors, id, rows * cols, 0));
    let outcome = crate::compare_subjects(&tried, &reference);
    let names: Vec<_> = outcome.failed.iter().map(|failure| failure.name.as_str()).collect();
    assert_eq!(names, ["prefill layer.01.ffn.down", "decode layer.01.ffn.down"]);
}

#[test]
fn a_wrong_parameter_in_a_model_is_found_by_the_name_of_its_step() {
    let (tensors, _guard) = crate::golden("qwen3", Dtype::F16);
    let options = LowerOptions {
        chunk: 8,
        ..crate::options(32)
    };
    let plan = crate::plan_of(&tensors, &options);
    let mut bad: Graph = (*plan.graph).clone();
    let mut op = |kind: ProgramKind, label: &str, change: fn(&mut Op)| {
        let mut steps = bad.programs[kind as usize].steps.iter_mut();
        change(&mut steps.find(|step| step.label == label).unwrap().op);
    };
    op(ProgramKind::Decode, "layer.02.attn.block", |op| match op {
        Op::AttnBlock(p) => p.scale *= 1.0 + 1e-4,
        _ => panic!("{op:?}"),
    });
    // Each result goes to the place of the next one.
    op(ProgramKind::Prefill, "layer.00.attn.qkv", |op| match op {
        Op::Matmul(p) => p.row0 += 4,
        _ => panic!("{op:?}"),
    });
    let bad = Plan {
        graph: Arc::new(bad),
        ..plan.clone()
    };
    let [tried, reference] = [&bad, &plan].map(|plan| crate::subject(plan, tensors.clone()));
    let outcome = crate::compare_subjects(&tried, &reference);
    let names: Vec<_> = outcome.failed.iter().map(|failure| failure.name.as_str()).collect();
    assert_eq!(names, ["prefill layer.00.attn.qkv", "decode layer.02.attn.block"]);
}
