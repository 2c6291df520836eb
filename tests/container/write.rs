//! Writing files, and reading them back.

use super::raw::{NO_MASKS, header, sample};
use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::TensorSpec;
use cmf_gpu::format::cmf::{CmfContainer, CmfWriter, Sections};
use serde_json::{Map, Value, json};
use std::path::Path;

fn members() -> Map<String, Value> {
    header().as_object().unwrap().clone()
}

fn specs() -> Vec<TensorSpec> {
    let spec = |record: &super::raw::Record| TensorSpec {
        name: String::from_utf8(record.name.clone()).unwrap(),
        dtype: Dtype::from_id(record.dtype).unwrap(),
        shape: record.shape[..usize::from(record.ndim)]
            .iter()
            .map(|&dim| u64::from(dim))
            .collect(),
    };
    sample().records.iter().map(spec).collect()
}

const SECTIONS: Sections = Sections {
    vocab: Some(b"{\"v\": 1}"),
    masks: Some(NO_MASKS),
    index: Some(&[0; 8]),
};

fn write(path: &Path) -> u64 {
    let mut writer = CmfWriter::create(path, members(), specs(), SECTIONS).unwrap();
    for record in sample().records {
        writer.write(&record.payload).unwrap();
    }
    writer.finish().unwrap()
}

fn files(dir: &Path) -> Vec<String> {
    std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

fn u64_at(file: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(file[at..at + 8].try_into().unwrap())
}

#[test]
fn a_written_file_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.cmf");
    std::fs::write(&path, "an older file").unwrap();
    let len = write(&path);
    assert_eq!(len, std::fs::metadata(&path).unwrap().len());
    assert_eq!(files(dir.path()), ["out.cmf"]);
    let container = CmfContainer::open(&path).unwrap();
    for (id, (record, spec)) in sample().records.iter().zip(specs()).enumerate() {
        let info = &container.infos()[id];
        assert_eq!(
            (&info.name, info.dtype, &info.shape),
            (&spec.name, spec.dtype, &spec.shape)
        );
        assert_eq!(container.bytes(id).unwrap(), record.payload);
        assert_eq!(container.payloads()[id].offset % 64, 0);
    }
    assert_eq!(container.tokenizer_json(), SECTIONS.vocab);
    assert_eq!(container.masks_section(), SECTIONS.masks);
    assert_eq!(container.header().arch.hidden_size, 64);
    let report = container.verify(&mut |_, _| ());
    assert!(report.ok() && report.notes.is_empty(), "{report:?}");

    let file = std::fs::read(&path).unwrap();
    let offsets = [0x10, 0x20, 0x30, 0x40, 0x50, 0x60].map(|at| u64_at(&file, at));
    assert!(
        offsets.is_sorted() && offsets[0] == 128 && offsets[2] % 4096 == 0,
        "{offsets:?}"
    );
    assert_eq!(file[0x0C], 0b111, "TENSOR_DIR, BINARY_MASKS, QUANT_2F");
    let again = dir.path().join("again.cmf");
    write(&again);
    assert_eq!(
        std::fs::read(&again).unwrap(),
        file,
        "the same input gives the same bytes"
    );
}

#[test]
fn feature_bits_follow_from_the_content() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.cmf");
    let features = |header: Map<String, Value>, dtype: Dtype, masks: bool, loops: bool| {
        let shape = vec![2, 32];
        let payload = &sample()
            .records
            .iter()
            .find(|r| Some(r.dtype) == dtype.id())
            .unwrap()
            .payload
            .clone();
        let specs = vec![TensorSpec {
            name: "t".into(),
            dtype,
            shape,
        }];
        let sections = Sections {
            masks: masks.then_some(NO_MASKS),
            ..Sections::default()
        };
        let mut writer = CmfWriter::create(&path, header, specs, sections).unwrap();
        if loops {
            writer = writer.with_loop_masks().unwrap();
        }
        writer.write(payload).unwrap();
        writer.finish().unwrap();
        CmfContainer::open(&path).unwrap();
        std::fs::read(&path).unwrap()[0x0C]
    };
    let with = |key: &str, value: Value| {
        let mut header = members();
        header.insert(key.into(), value);
        header
    };
    let mut looped = members();
    looped["arch"]["num_loops"] = json!(2);
    assert_eq!(features(members(), Dtype::Q1s, false, false), 0b1);
    assert_eq!(features(members(), Dtype::Vbit, false, false), 0b101);
    assert_eq!(features(members(), Dtype::VbitRo, false, false), 0b101);
    assert_eq!(features(looped.clone(), Dtype::Q1s, true, false), 0b11);
    assert_eq!(features(looped, Dtype::Q1s, true, true), 0b10_0011);
    let skill = |hash: Value| with("skills", json!([{"id": "a", "base_dir_hash": hash}]));
    assert_eq!(features(skill(json!("0f")), Dtype::Q1s, false, false), 0b100_0001);
    assert_eq!(features(skill(Value::Null), Dtype::Q1s, false, false), 0b1);
}

#[test]
fn a_file_without_tensors_or_sections_is_valid() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.cmf");
    let len = CmfWriter::create(&path, members(), Vec::new(), Sections::default())
        .unwrap()
        .finish()
        .unwrap();
    assert_eq!(len, std::fs::metadata(&path).unwrap().len());
    assert!(CmfContainer::open(&path).unwrap().verify(&mut |_, _| ()).ok());
}

#[test]
fn an_unfinished_file_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.cmf");
    std::fs::write(&path, "an older file").unwrap();
    let mut writer = CmfWriter::create(&path, members(), specs(), SECTIONS).unwrap();
    writer.write(&sample().records[0].payload).unwrap();
    assert_eq!(files(dir.path()).len(), 2, "the temporary file is beside the target");
    let err = writer.finish().unwrap_err();
    assert_eq!(err.kind, Kind::Usage);
    assert!(
        err.message.contains("1 of 13 tensors are written, 'f16' is next"),
        "{err}"
    );
    drop(CmfWriter::create(&path, members(), specs(), SECTIONS).unwrap());
    assert_eq!(files(dir.path()), ["out.cmf"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"an older file");
}

#[test]
fn invalid_contents_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.cmf");
    let f16 = |name: &str, shape: &[u64]| TensorSpec {
        name: name.into(),
        dtype: Dtype::F16,
        shape: shape.to_vec(),
    };
    let create = |header: Map<String, Value>, specs: Vec<TensorSpec>, sections: Sections| {
        CmfWriter::create(&path, header, specs, sections)
            .map(|_| ())
            .unwrap_err()
            .kind
    };
    let none = Sections::default();
    let long = "n".repeat(65536);
    for spec in [f16("", &[1]), f16(&long, &[1]), f16("a", &[1; 7]), f16("a", &[1 << 32])] {
        assert_eq!(
            create(members(), vec![spec.clone()], none),
            Kind::Usage,
            "{:?}",
            spec.shape
        );
    }
    assert_eq!(create(members(), vec![f16("a", &[0])], none), Kind::Parse);
    assert_eq!(
        create(members(), vec![f16("a", &[1]), f16("a", &[1])], none),
        Kind::Usage
    );
    assert_eq!(
        create(
            members(),
            Vec::new(),
            Sections {
                vocab: Some(b""),
                ..none
            }
        ),
        Kind::Usage
    );
    assert_eq!(create(Map::new(), Vec::new(), none), Kind::Parse);
    let mut header = members();
    header["arch"]["head_dim"] = json!(0);
    assert_eq!(create(header, Vec::new(), none), Kind::Parse);

    let mut writer = CmfWriter::create(&path, members(), vec![f16("a", &[3])], none).unwrap();
    let err = writer.write(&[0; 5]).unwrap_err();
    assert!(err.kind == Kind::Parse && err.message.contains("tensor 'a'"), "{err}");
    writer.write(&[0; 6]).unwrap();
    assert_eq!(writer.write(&[0; 6]).unwrap_err().kind, Kind::Usage);
    assert_eq!(writer.with_loop_masks().map(|_| ()).unwrap_err().kind, Kind::Usage);
    assert!(files(dir.path()).is_empty());
}

#[test]
fn targets_that_are_not_regular_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let kind = |path: &Path| {
        CmfWriter::create(path, members(), Vec::new(), Sections::default())
            .map(|_| ())
            .unwrap_err()
            .kind
    };
    assert_eq!(kind(dir.path()), Kind::Io);
    assert_eq!(kind(&dir.path().join("missing/out.cmf")), Kind::Io);
    assert_eq!(kind("..".as_ref()), Kind::Usage);
    #[cfg(unix)]
    assert_eq!(kind("/dev/null".as_ref()), Kind::Io);
}

#[cfg(unix)]
#[test]
fn the_umask_applies_to_new_files() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode();
    let (ours, plain) = (dir.path().join("out.cmf"), dir.path().join("plain"));
    write(&ours);
    std::fs::write(&plain, "").unwrap();
    assert_eq!(mode(&ours), mode(&plain));
}
