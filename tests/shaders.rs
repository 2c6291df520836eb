//! Every composed shader, without a GPU: parsed, validated, compared with the catalogue, and translated to SPIR-V, MSL
//! and HLSL.

use cmf_gpu::kernel::{Access, Variant};
use cmf_gpu::shader::{all_variants, compose};
use naga::back::{hlsl, msl, spv};
use naga::valid::{Capabilities, FunctionInfo, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, Expression, Function, Handle, Module, Statement, StorageAccess, TypeInner};

/// What the WebGPU defaults guarantee.
const MAX_STORAGE_BUFFERS: usize = 8;
const MAX_WORKGROUP_BYTES: u32 = 16384;
const MAX_THREADS: u32 = 256;

fn parse(variant: &Variant) -> (Module, ModuleInfo) {
    let text = compose(variant);
    let fail = |what: String| -> ! { panic!("{}: {what}\n{}", variant.name(), numbered(&text)) };
    let module =
        naga::front::wgsl::parse_str(&text).unwrap_or_else(|err| fail(err.emit_to_string_with_path(&text, "shader")));
    let mut validator = Validator::new(
        ValidationFlags::all(),
        Capabilities::SUBGROUP | Capabilities::SHADER_FLOAT16_IN_FLOAT32,
    );
    let validator = validator
        .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
        .subgroup_operations(naga::valid::SubgroupOperationSet::all());
    let info = validator
        .validate(&module)
        .unwrap_or_else(|err| fail(err.emit_to_string(&text)));
    (module, info)
}

fn numbered(text: &str) -> String {
    text.lines()
        .enumerate()
        .map(|(i, line)| format!("{:4} {line}\n", i + 1))
        .collect()
}

#[test]
fn every_variant_is_valid_and_is_what_the_catalogue_says() {
    for variant in all_variants() {
        let (module, _) = parse(&variant);
        let name = variant.name();
        let row = variant.kernel.row();

        assert_eq!(module.entry_points.len(), 1, "{name}");
        let entry = &module.entry_points[0];
        assert_eq!(entry.name, "main", "{name}");
        assert_eq!(entry.workgroup_size, [variant.threads(), 1, 1], "{name}");
        assert!(variant.threads() <= MAX_THREADS, "{name}");

        let mut storage = Vec::new();
        let mut workgroup_bytes = 0;
        let mut params = None;
        for (_, global) in module.global_variables.iter() {
            match global.space {
                AddressSpace::Storage { access } => {
                    let binding = global.binding.expect("a storage variable has a binding");
                    assert_eq!(binding.group, 0, "{name}");
                    let access = if access.contains(StorageAccess::STORE) {
                        Access::Write
                    } else {
                        Access::Read
                    };
                    storage.push((binding.binding, global.name.clone().expect("a name"), access));
                }
                AddressSpace::Uniform => params = Some(global),
                AddressSpace::WorkGroup => workgroup_bytes += module.types[global.ty].inner.size(module.to_ctx()),
                _ => {}
            }
        }
        storage.sort_by_key(|entry| entry.0);
        let wanted: Vec<_> = row
            .bindings
            .iter()
            .enumerate()
            .map(|(i, &(name, access))| (i as u32 + 1, name.to_string(), access))
            .collect();
        assert_eq!(storage, wanted, "{name}");
        assert!(
            storage.len() <= MAX_STORAGE_BUFFERS,
            "{name} binds {} storage buffers",
            storage.len()
        );
        assert!(
            workgroup_bytes <= MAX_WORKGROUP_BYTES,
            "{name} needs {workgroup_bytes} bytes of workgroup memory"
        );

        let params = params.unwrap_or_else(|| panic!("{name} has no parameters"));
        let TypeInner::Struct { members, .. } = &module.types[params.ty].inner else {
            panic!("{name}: Params")
        };
        let fields: Vec<_> = members
            .iter()
            .map(|member| {
                let ty = match module.types[member.ty].inner {
                    TypeInner::Scalar(naga::Scalar::U32) => "u32",
                    TypeInner::Scalar(naga::Scalar::F32) => "f32",
                    ref other => panic!("{name}: {other:?} in Params"),
                };
                (member.name.clone().expect("a name"), ty, member.offset)
            })
            .collect();
        let wanted: Vec<_> = variant
            .kernel
            .fields()
            .iter()
            .enumerate()
            .map(|(i, &(field, ty))| (field.to_string(), ty, i as u32 * 4))
            .collect();
        assert_eq!(fields, wanted, "{name}");
    }
}

#[test]
fn every_variant_translates_to_every_backend() {
    for variant in all_variants() {
        let (module, info) = parse(&variant);
        let name = variant.name();
        let options = spv::Options {
            lang_version: (1, 3),
            ..Default::default()
        };
        let words = spv::write_vec(&module, &info, &options, None).unwrap_or_else(|err| panic!("{name}: {err}"));
        assert!(!words.is_empty());

        let options = msl::Options {
            lang_version: (2, 4),
            fake_missing_bindings: true,
            ..Default::default()
        };
        let (text, _) = msl::write_string(&module, &info, &options, &msl::PipelineOptions::default())
            .unwrap_or_else(|err| panic!("{name}: {err}"));
        assert!(text.contains("kernel void"), "{name}");

        let options = hlsl::Options {
            shader_model: hlsl::ShaderModel::V6_0,
            ..Default::default()
        };
        let mut text = String::new();
        let pipeline = hlsl::PipelineOptions::default();
        hlsl::Writer::new(&mut text, &options, &pipeline)
            .write(&module, &info, None)
            .unwrap_or_else(|err| panic!("{name}: {err}"));
        assert!(text.contains("numthreads"), "{name}");
    }
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

/// The old shader compiler of DirectX rejects them.
#[test]
fn no_variant_writes_to_a_vector_by_a_variable_index() {
    for variant in all_variants() {
        let (module, info) = parse(&variant);
        assert_eq!(all_indexed_writes(&module, &info), 0, "{}", variant.name());
    }
    // What is looked for is found, whatever the vector lies in, and nothing else is.
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
    let module = naga::front::wgsl::parse_str(source).unwrap();
    let info = Validator::new(ValidationFlags::all(), Capabilities::empty())
        .validate(&module)
        .unwrap();
    assert_eq!(all_indexed_writes(&module, &info), 3);
}
