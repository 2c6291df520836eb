//! Every composed shader, without a GPU: parsed, validated, checked against the limits of devices, and translated to SPIR-V, MSL
//! and HLSL. One pass over all variants makes all checks; each test reports the findings of one of them.

use cmf_gpu::gpu::simplify;
use cmf_gpu::op::{BATCH_HEADER, SlotState, TABLE_HEADER, Token};
use cmf_gpu::sampling;
use cmf_gpu::shader::{Variant, compose};
use naga::back::{hlsl, msl, spv};
use naga::valid::{Capabilities, FunctionInfo, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, Expression, Function, Handle, Module, Statement, TypeInner};
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

/// What the WebGPU defaults guarantee.
const MAX_STORAGE_BUFFERS: usize = 8;
const MAX_WORKGROUP_BYTES: u32 = 16384;
const MAX_THREADS: u32 = 256;

/// A check of one variant. Errors say what is wrong.
type Check = Result<(), String>;

macro_rules! ensure {
    ($condition:expr, $($text:tt)*) => {
        if !$condition {
            return Err(format!($($text)*));
        }
    };
}

/// The findings of all checks.
struct Findings {
    variants: usize,
    /// Variants that became smaller when they were simplified.
    smaller: usize,
    /// By check: the variants that failed it, with the reason.
    failed: BTreeMap<&'static str, Vec<String>>,
}

static FINDINGS: LazyLock<Findings> = LazyLock::new(|| {
    let variants = Variant::all();
    let (next, smaller) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let failed: Mutex<BTreeMap<&str, Vec<String>>> = Mutex::default();
    let work = || {
        while let Some(variant) = variants.get(next.fetch_add(1, Ordering::Relaxed)) {
            let fail = |check: &'static str, reason: String| {
                let mut failed = failed.lock().unwrap();
                failed
                    .entry(check)
                    .or_default()
                    .push(format!("{}: {reason}", variant.name()));
            };
            let text = compose(variant);
            let (module, info) = match parse(&text) {
                Ok(parsed) => parsed,
                Err(reason) => {
                    fail("valid", format!("{reason}\n{}", numbered(&text)));
                    continue;
                }
            };
            let mut simple = module.clone();
            simplify(&mut simple);
            smaller.fetch_add(
                usize::from(simple.functions.len() < module.functions.len()),
                Ordering::Relaxed,
            );
            let checks: [(&str, Check); 6] = [
                ("limits", keeps_limits(variant, &module)),
                ("spirv", translates_to_spirv(&module, &info)),
                ("msl", translates_to_msl(&module, &info)),
                ("hlsl", translates_to_hlsl(&module, &info)),
                ("indexed writes", has_no_indexed_writes(&module, &info)),
                ("simplified", stays_valid(&module, &simple)),
            ];
            for (check, result) in checks {
                if let Err(reason) = result {
                    fail(check, reason);
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    Findings {
        variants: variants.len(),
        smaller: smaller.into_inner(),
        failed: failed.into_inner().unwrap(),
    }
});

/// Fails when a variant failed this check, or did not get so far.
fn passed(check: &str) {
    assert!(FINDINGS.variants > 1000, "only {} variants", FINDINGS.variants);
    for check in ["valid", check] {
        if let Some(failed) = FINDINGS.failed.get(check) {
            let first = failed[..failed.len().min(10)].join("\n");
            panic!(
                "{} variants failed the check '{check}', the first are\n{first}",
                failed.len()
            );
        }
    }
}

#[test]
fn every_variant_is_valid() {
    passed("valid");
}

#[test]
fn every_variant_keeps_the_limits_of_devices() {
    passed("limits");
}

#[test]
fn every_variant_translates_to_spirv() {
    passed("spirv");
}

#[test]
fn every_variant_translates_to_msl() {
    passed("msl");
}

#[test]
fn every_variant_translates_to_hlsl() {
    passed("hlsl");
}

/// The old shader compiler of DirectX rejects such writes.
#[test]
fn no_variant_writes_to_a_vector_by_a_variable_index() {
    passed("indexed writes");
}

#[test]
fn every_variant_stays_valid_and_does_not_grow_when_it_is_simplified() {
    passed("simplified");
    assert!(FINDINGS.smaller > 0);
}

/// The offset in bytes of a member of a structure, `None` if the module does not have it; without a member the size.
fn layout(module: &Module, structure: &str, member: Option<&str>) -> Option<usize> {
    module.types.iter().find_map(|(_, ty)| match &ty.inner {
        TypeInner::Struct { members, span } if ty.name.as_deref() == Some(structure) => match member {
            None => Some(*span as usize),
            Some(_) => members
                .iter()
                .find(|found| found.name.as_deref() == member)
                .map(|found| found.offset as usize),
        },
        _ => None,
    })
}

#[test]
fn structures_have_the_same_layout_in_rust() {
    let variants = Variant::all();
    let module = |kernel: &str| {
        let variant = variants
            .iter()
            .find(|variant| variant.kernel.spec().name == kernel)
            .unwrap();
        parse(&compose(variant)).unwrap().0
    };
    let table = sampling::SETTINGS_WORDS - 2048;
    let of_sample: [(&str, Option<&str>, usize); 15] = [
        ("Token", None, size_of::<Token>()),
        ("Token", Some("id"), offset_of!(Token, id)),
        ("Token", Some("slot"), offset_of!(Token, slot)),
        ("Token", Some("position"), offset_of!(Token, position)),
        ("Batch", Some("tokens"), 4 * BATCH_HEADER),
        ("Slot", None, size_of::<SlotState>()),
        ("Slot", Some("sampled"), offset_of!(SlotState, sampled)),
        ("Slot", Some("count"), offset_of!(SlotState, count)),
        ("Slot", Some("drafted"), offset_of!(SlotState, drafted)),
        ("Slot", Some("step"), offset_of!(SlotState, step)),
        ("Slot", Some("stop"), offset_of!(SlotState, stop)),
        ("Slot", Some("last"), offset_of!(SlotState, last)),
        ("Batch", Some("count"), 0),
        ("Settings", Some("stop_tokens"), 4 * (table - sampling::MAX_STOPS)),
        ("Settings", Some("tables"), 4 * table),
    ];
    let sample = module("sample");
    for (structure, member, expected) in of_sample {
        assert_eq!(
            layout(&sample, structure, member),
            Some(expected),
            "{structure} {member:?}"
        );
    }
    let route = module("moe_route");
    assert_eq!(layout(&route, "Experts", Some("all")), Some(4 * TABLE_HEADER));
    assert_eq!(layout(&route, "Expert", None), Some(8));
}

fn validate(module: &Module, capabilities: Capabilities) -> Result<ModuleInfo, String> {
    let mut validator = Validator::new(ValidationFlags::all(), capabilities);
    let validator = validator
        .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
        .subgroup_operations(naga::valid::SubgroupOperationSet::all());
    validator
        .validate(module)
        .map_err(|err| err.emit_to_string("").trim_end().to_owned())
}

fn parse(text: &str) -> Result<(Module, ModuleInfo), String> {
    let module = naga::front::wgsl::parse_str(text).map_err(|err| err.emit_to_string_with_path(text, "shader"))?;
    let info = validate(
        &module,
        Capabilities::SUBGROUP | Capabilities::SHADER_FLOAT16_IN_FLOAT32,
    )?;
    Ok((module, info))
}

fn numbered(text: &str) -> String {
    text.lines()
        .enumerate()
        .map(|(i, line)| format!("{:4} {line}\n", i + 1))
        .collect()
}

fn keeps_limits(variant: &Variant, module: &Module) -> Check {
    let [entry] = module.entry_points.as_slice() else {
        return Err(format!("{} entry points, expected 1", module.entry_points.len()));
    };
    ensure!(entry.name == "main", "the entry point is {}, expected main", entry.name);
    let threads = variant.threads();
    ensure!(
        entry.workgroup_size == [threads, 1, 1] && threads <= MAX_THREADS,
        "a workgroup has {:?} threads, expected {threads}, at most {MAX_THREADS}",
        entry.workgroup_size
    );

    let (mut storage, mut workgroup_bytes) = (0, 0);
    for (_, global) in module.global_variables.iter() {
        match global.space {
            AddressSpace::Storage { .. } => storage += 1,
            AddressSpace::WorkGroup => workgroup_bytes += module.types[global.ty].inner.size(module.to_ctx()),
            _ => {}
        }
    }
    // Declarations are generated from the operator, and no file adds others.
    let declared = variant.kernel.spec().storage().count();
    ensure!(
        storage == declared && storage <= MAX_STORAGE_BUFFERS,
        "binds {storage} storage buffers, expected {declared}, at most {MAX_STORAGE_BUFFERS}"
    );
    ensure!(
        workgroup_bytes <= MAX_WORKGROUP_BYTES,
        "needs {workgroup_bytes} bytes of workgroup memory, at most {MAX_WORKGROUP_BYTES} are allowed"
    );
    Ok(())
}

fn translates_to_spirv(module: &Module, info: &ModuleInfo) -> Check {
    let options = spv::Options {
        lang_version: (1, 3),
        ..Default::default()
    };
    let words = spv::write_vec(module, info, &options, None).map_err(|err| err.to_string())?;
    ensure!(!words.is_empty(), "no SPIR-V");
    Ok(())
}

fn translates_to_msl(module: &Module, info: &ModuleInfo) -> Check {
    let options = msl::Options {
        lang_version: (2, 4),
        fake_missing_bindings: true,
        ..Default::default()
    };
    let (text, _) =
        msl::write_string(module, info, &options, &msl::PipelineOptions::default()).map_err(|err| err.to_string())?;
    ensure!(text.contains("kernel void"), "no kernel in MSL:\n{text}");
    Ok(())
}

fn translates_to_hlsl(module: &Module, info: &ModuleInfo) -> Check {
    let options = hlsl::Options {
        shader_model: hlsl::ShaderModel::V6_0,
        ..Default::default()
    };
    let mut text = String::new();
    let pipeline = hlsl::PipelineOptions::default();
    hlsl::Writer::new(&mut text, &options, &pipeline)
        .write(module, info, None)
        .map_err(|err| err.to_string())?;
    ensure!(text.contains("numthreads"), "no entry point in HLSL:\n{text}");
    Ok(())
}

fn stays_valid(module: &Module, simple: &Module) -> Check {
    let (before, after) = (module.functions.len(), simple.functions.len());
    ensure!(after <= before, "{before} functions became {after}");
    validate(simple, Capabilities::all()).map(drop)
}

/// Statements of a function that write to a component of a vector by an index that is not constant.
fn indexed_writes(module: &Module, function: &Function, info: &FunctionInfo) -> usize {
    let is_component = |pointer: Handle<Expression>| match function.expressions[pointer] {
        Expression::Access { base, .. } => match *info[base].ty.inner_with(&module.types) {
            TypeInner::Pointer { base, .. } => matches!(module.types[base].inner, TypeInner::Vector { .. }),
            TypeInner::ValuePointer { size, .. } => size.is_some(),
            _ => false,
        },
        _ => false,
    };
    let (mut count, mut blocks) = (0, vec![&function.body]);
    while let Some(block) = blocks.pop() {
        for statement in block {
            match statement {
                Statement::Store { pointer, .. } if is_component(*pointer) => count += 1,
                Statement::Block(inner) => blocks.push(inner),
                Statement::If { accept, reject, .. } => blocks.extend([accept, reject]),
                Statement::Loop { body, continuing, .. } => blocks.extend([body, continuing]),
                Statement::Switch { cases, .. } => blocks.extend(cases.iter().map(|case| &case.body)),
                _ => {}
            }
        }
    }
    count
}

fn all_indexed_writes(module: &Module, info: &ModuleInfo) -> usize {
    let functions = module.functions.iter();
    let functions = functions.map(|(handle, function)| indexed_writes(module, function, &info[handle]));
    let entries = module.entry_points.iter().enumerate();
    let entries = entries.map(|(i, entry)| indexed_writes(module, &entry.function, info.get_entry_point(i)));
    functions.chain(entries).sum()
}

fn has_no_indexed_writes(module: &Module, info: &ModuleInfo) -> Check {
    let writes = all_indexed_writes(module, info);
    ensure!(
        writes == 0,
        "{writes} writes to components of vectors by a variable index"
    );
    Ok(())
}

#[test]
fn writes_by_a_variable_index_are_found_in_all_places() {
    let source = "
        @group(0) @binding(0) var<storage, read_write> out: array<vec4f>;
        var<workgroup> shared_rows: array<vec4f, 8>;
        fn inner(i: u32) { var v = vec4f(); if i > 2u { v[i & 3u] = 1.0; } out[i] = v; }
        @compute @workgroup_size(1) fn main(@builtin(local_invocation_index) i: u32) {
            inner(i);
            loop { if i > 0u { break; } out[0][i & 3u] = 2.0; }
            shared_rows[i][i & 3u] = 3.0;
            out[1][2] = 4.0;
            out[2].x = shared_rows[i][i & 3u];
        }";
    let (module, info) = parse(source).unwrap();
    assert_eq!(all_indexed_writes(&module, &info), 3);
    assert!(has_no_indexed_writes(&module, &info).is_err());
}

#[test]
fn a_shader_that_is_wrong_is_found() {
    let variant = Variant::all().into_iter().next().unwrap();
    let text = compose(&variant);
    assert!(
        parse(&text.replacen("fn main", "fn main2", 1))
            .is_ok_and(|(module, _)| keeps_limits(&variant, &module).is_err())
    );
    assert!(parse("fn f() -> u32 { return 1.5; }").is_err());
    assert!(parse("fn f( {").is_err());
}
