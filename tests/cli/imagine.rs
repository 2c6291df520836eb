//! `imagine`: pictures, the files beside them, and what is refused before the first step.

use crate::build::{Ran, has, model, program, run};
use crate::golden::pipeline::{F16, container, dir};
use crate::pipelines::copy_dir;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The flags of the recorded picture `tests/fixtures/lumina/tall_trunc_neg.f16.png`.
const RECORDED: [&str; 20] = [
    "-p",
    "a lighthouse, 1920s poster",
    "-n",
    "blurry, low quality",
    "--system",
    "Draw:",
    "-W",
    "80",
    "-H",
    "144",
    "--steps",
    "8",
    "--cfg",
    "5.5",
    "--cfg-norm",
    "off",
    "--cfg-trunc",
    "0.6",
    "--seed",
    "20240813",
];

/// A small picture in few steps.
const SMALL: [&str; 10] = ["-p", "a fox", "-W", "32", "-H", "48", "--steps", "2", "--cfg", "1"];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn imagine(flags: &[&[&str]]) -> Ran {
    run(&[&["imagine"], flags.concat().as_slice()].concat())
}

/// Size, pixels and text chunks of a PNG file.
struct Picture {
    size: (u32, u32),
    rgb: Vec<u8>,
    texts: Vec<(String, String)>,
}

fn picture(path: &Path) -> Picture {
    let file = std::io::BufReader::new(std::fs::File::open(path).unwrap());
    let mut reader = png::Decoder::new(file).read_info().unwrap();
    let mut rgb = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut rgb).unwrap();
    let info = reader.info();
    assert_eq!(
        (info.color_type, info.bit_depth),
        (png::ColorType::Rgb, png::BitDepth::Eight)
    );
    let plain = info.uncompressed_latin1_text.iter();
    let mut texts: Vec<_> = plain.map(|chunk| (chunk.keyword.clone(), chunk.text.clone())).collect();
    let wide = info.utf8_text.iter();
    texts.extend(wide.map(|chunk| (chunk.keyword.clone(), chunk.get_text().unwrap())));
    Picture {
        size: (info.width, info.height),
        rgb,
        texts,
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The largest difference of two pictures, and the number of values that differ.
fn difference(a: &Picture, b: &Picture) -> (u8, usize) {
    assert_eq!(a.size, b.size);
    let differences = a.rgb.iter().zip(&b.rgb).map(|(a, b)| a.abs_diff(*b));
    (
        differences.clone().max().unwrap(),
        differences.filter(|&d| d > 0).count(),
    )
}

#[test]
fn a_seed_makes_the_picture_that_diffusers_makes() {
    let golden = picture(&crate::build::fixture("lumina/tall_trunc_neg.f16.png"));
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("lighthouse.png");
    let made = |model: &Path, device: &str| {
        let ran = imagine(&[
            &[text(model), "-o", text(&file), "--device", device, "--json"],
            &RECORDED,
        ])
        .json();
        has(
            &ran,
            &["images", "seed", "steps", "width", "height", "stage_s", "device"],
        );
        assert_eq!(
            (&ran["images"], &ran["seed"]),
            (&json!([text(&file)]), &json!(20_240_813))
        );
        assert_eq!(
            (&ran["steps"], &ran["width"], &ran["height"]),
            (&json!(8), &json!(80), &json!(144))
        );
        for stage in ["load", "text", "denoise", "decode"] {
            assert!(ran["stage_s"][stage].is_f64(), "{ran}");
        }
        picture(&file)
    };
    for (model, device) in [(dir(), "auto"), (container(F16), "auto"), (container(F16), "cpu")] {
        let made = made(&model, device);
        let (most, count) = difference(&made, &golden);
        // One value in five hundred may round to the other side.
        assert!(most <= 1 && count <= made.rgb.len() / 500, "{most} {count}");
        let [(keyword, settings)] = &made.texts[..] else {
            panic!("{:?}", made.texts);
        };
        assert_eq!(keyword, "parameters");
        let wanted = "a lighthouse, 1920s poster\nNegative prompt: blurry, low quality\nSteps: 8, Sampler: Euler, \
                      Schedule type: Flow match, CFG scale: 5.5, Seed: 20240813, Size: 80x144, ";
        assert!(settings.starts_with(wanted), "{settings}");
        assert!(settings.contains("Shift: 6, Version: cmf-gpu "), "{settings}");
    }
    assert_eq!(names(out.path()), ["lighthouse.png"]);
}

#[test]
fn several_pictures_have_the_next_seeds() {
    let out = tempfile::tempdir().unwrap();
    let (model, file, latents) = (
        container(F16),
        out.path().join("fox.png"),
        out.path().join("fox.safetensors"),
    );
    let common = [
        &[text(&model), "--no-metadata", "-o", text(&file), "--json"],
        &SMALL[..],
    ]
    .concat();
    let save = ["-b", "2", "--seed", "41", "--save-latents", text(&latents)];
    let ran = imagine(&[&common, &save]).json();
    let [first, second] = ["fox-1.png", "fox-2.png"].map(|name| out.path().join(name));
    assert_eq!(
        (&ran["images"], &ran["seed"], &ran["seeds"]),
        (&json!([first, second]), &json!(41), &json!([41, 42]))
    );
    assert_eq!(
        names(out.path()),
        ["fox-1.png", "fox-1.safetensors", "fox-2.png", "fox-2.safetensors"]
    );
    let saved = ["fox-1.safetensors", "fox-2.safetensors"].map(|name| out.path().join(name));
    assert_eq!(ran["latents"], json!(saved));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&saved[0]), mode(&first));
    }
    assert!(picture(&first).texts.is_empty());
    assert_ne!(picture(&first).rgb, picture(&second).rgb);
    imagine(&[&common, &["--seed", "42"]]).json();
    assert_eq!(picture(&file).rgb, picture(&second).rgb, "a batch changes nothing");
    // Latents of the noise of a seed make the same picture.
    let bytes = std::fs::read(out.path().join("fox-2.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.tensor("latents").unwrap().shape(), [16, 6, 4]);
}

#[test]
fn latents_replace_the_noise_and_decide_the_size() {
    let out = tempfile::tempdir().unwrap();
    let (model, file, noise) = (
        container(F16),
        out.path().join("a.png"),
        out.path().join("noise.safetensors"),
    );
    let values: Vec<u8> = cmf_gpu::image::sampler::noise(7, 16 * 6 * 4)
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let view = |shape: &[usize]| {
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), &values).unwrap()
    };
    safetensors::serialize_to_file([("latents", view(&[16, 6, 4]))], None, &noise).unwrap();
    let common = [
        text(&model),
        "-p",
        "a fox",
        "--steps",
        "2",
        "--cfg",
        "1",
        "-o",
        text(&file),
    ];
    let ran = imagine(&[&common, &["--init-latents", text(&noise), "--json"]]).json();
    assert_eq!(
        (&ran["width"], &ran["height"], &ran["seed"]),
        (&json!(32), &json!(48), &Value::Null)
    );
    let from_file = picture(&file);
    assert!(!from_file.texts[0].1.contains("Seed"), "{:?}", from_file.texts);
    imagine(&[&common, &["--seed", "7", "-W", "32", "-H", "48", "--json"]]).json();
    assert_eq!(from_file.rgb, picture(&file).rgb);
    let refused = |shape: &[usize], more: &[&str], code, kind: &str| {
        safetensors::serialize_to_file([("latents", view(shape))], None, &noise).unwrap();
        imagine(&[&common, &["--init-latents", text(&noise)], more]).fails(code, kind)
    };
    assert!(refused(&[16, 24], &[], 1, "Parse").contains("[16, 24]"));
    refused(&[8, 6, 8], &[], 2, "Usage");
    refused(&[16, 6, 4], &["-W", "64"], 2, "Usage");
    refused(&[16, 6, 4], &["-b", "2"], 2, "Usage");
    std::fs::write(&noise, "nonsense").unwrap();
    imagine(&[&common, &["--init-latents", text(&noise)]]).fails(1, "Parse");
}

#[test]
fn previews_are_pictures_of_the_steps() {
    let out = tempfile::tempdir().unwrap();
    let (model, file) = (container(F16), out.path().join("fox.png"));
    let common = [
        &[text(&model), "-o", text(&file), "--seed", "1", "--preview-every", "1"],
        &SMALL[..],
    ]
    .concat();
    imagine(&[&common]);
    assert_eq!(names(out.path()), ["fox-preview.png", "fox.png"]);
    imagine(&[&common, &["-b", "2"]]);
    let more = ["fox-1.png", "fox-2.png", "fox-preview-1.png", "fox-preview-2.png"];
    assert!(more.iter().all(|name| names(out.path()).contains(&name.to_string())));
    let named = out.path().join("p.png");
    imagine(&[&common, &["--preview-path", text(&named)]]);
    assert!(named.exists());
    let same = imagine(&[&common, &["--preview-path", text(&file)]]).fails(2, "Usage");
    assert!(same.contains("two outputs"), "{same}");
    imagine(&[
        &[text(&model), "-o", text(&file), "--preview-path", text(&named)],
        &SMALL,
    ])
    .fails(2, "Usage");
}

/// Refused before anything is loaded or written.
#[test]
fn bad_requests_are_refused() {
    let out = tempfile::tempdir().unwrap();
    let (pipeline, file) = (container(F16), out.path().join("a.png"));
    let (path, at) = (text(&pipeline), text(&file));
    let refused = |flags: &[&str], code, kind: &str, message: &str| {
        let found = imagine(&[flags]).fails(code, kind);
        assert!(found.contains(message), "{found}");
        assert_eq!(names(out.path()), Vec::<String>::new());
    };
    let with = |more: &[&'static str]| [&[path, "-p", "x", "-o", at], more].concat();
    refused(&[path, "-o", at], 2, "Usage", "--prompt");
    refused(&[path, "-p", "x"], 2, "Usage", "--out");
    refused(&[path, "-p", "x", "-o", "a.jpg"], 2, "Usage", ".png");
    refused(&with(&["-W", "100"]), 2, "Usage", "96 and 112");
    refused(&with(&["-W", "0"]), 2, "Usage", "");
    refused(&with(&["-H", "1040"]), 2, "Usage", "at most 1024");
    refused(&with(&["--steps", "0"]), 2, "Usage", "1 to 1000");
    refused(&with(&["--cfg", "nan"]), 2, "Usage", "0 to 1000");
    refused(&with(&["--cfg-trunc", "2"]), 2, "Usage", "0 to 1");
    refused(&with(&["--shift", "0"]), 2, "Usage", "above 0");
    refused(&with(&["-b", "0"]), 2, "Usage", "1 to 999");
    refused(&with(&["--init-img", "cat.png"]), 2, "Usage", "no encoder");
    refused(&with(&["--strength", "0.5"]), 2, "Usage", "no encoder");
    refused(&[model(), "-p", "x", "-o", at], 1, "UnsupportedModel", "`cmf-gpu run`");
    refused(
        &[path, "-p", "x", "-o", "/no/such/folder/a.png"],
        1,
        "Io",
        "/no/such/folder/a.png",
    );
    refused(
        &[path, "-p", "x", "-o", at, "--save-latents", "/no/such/folder/l"],
        1,
        "Io",
        "/no/such/folder/l",
    );
    refused(&with(&["--vram-mb", "1"]), 1, "OutOfMemory", "--vram-mb");
    let inside = pipeline.with_extension("png");
    std::fs::copy(&pipeline, &inside).unwrap();
    refused(
        &[text(&inside), "-p", "x", "-o", text(&inside)],
        2,
        "Usage",
        "replace an input",
    );
    std::fs::remove_file(inside).unwrap();
}

/// Positions without end, in a file or a flag, are no reason to run out of memory.
#[test]
fn sizes_beyond_the_memory_are_refused() {
    let copy = tempfile::tempdir().unwrap();
    copy_dir(&dir(), copy.path());
    let config = copy.path().join("transformer/config.json");
    let mut edited: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    edited["axes_lens"] = json!([300, 1 << 24, 1 << 24]);
    std::fs::write(&config, edited.to_string()).unwrap();
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("a.png");
    for device in ["auto", "cpu"] {
        for side in ["268435440", "65536"] {
            let flags = ["-p", "x", "-o", text(&file), "-W", side, "-H", side, "--device", device];
            let message = imagine(&[&[text(copy.path())], &flags]).fails(1, "OutOfMemory");
            assert!(message.contains("-W and -H set the size"), "{message}");
        }
    }
    assert_eq!(names(out.path()), Vec::<String>::new());
}

/// A limit on the length of files stands for a full disk.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_no_part_of_a_file() {
    let out = tempfile::tempdir().unwrap();
    let (model, file) = (container(F16), out.path().join("a.png"));
    for more in [&[][..], &["--save-latents", "l.safetensors"], &["--preview-every", "1"]] {
        let mut command = std::process::Command::new("sh");
        // Writes fail instead of ending the program.
        command.args([
            "-c",
            "trap '' XFSZ; ulimit -f 1; exec \"$@\"",
            "sh",
            env!("CARGO_BIN_EXE_cmf-gpu"),
            "imagine",
        ]);
        command.args([text(&model), "-o", text(&file)]).args(SMALL).args(more);
        let ran = Ran::of(command.current_dir(out.path()).output().unwrap());
        let message = ran.fails(1, "Io");
        assert!(message.contains("File too large"), "{message}");
        assert_eq!(names(out.path()), Vec::<String>::new(), "{more:?}");
    }
}

/// Weights that are not finite never become a black picture.
#[test]
fn a_picture_of_numbers_that_are_not_finite_is_an_error() {
    let copy = tempfile::tempdir().unwrap();
    copy_dir(&dir(), copy.path());
    let config = copy.path().join("vae/config.json");
    let plain = std::fs::read_to_string(&config).unwrap();
    std::fs::write(
        &config,
        plain.replace("\"scaling_factor\": 0.3611", "\"scaling_factor\": 1e-37"),
    )
    .unwrap();
    let out = tempfile::tempdir().unwrap();
    let (file, latents) = (out.path().join("a.png"), out.path().join("l.safetensors"));
    let ran = imagine(&[&[text(copy.path()), "-o", text(&file), "--seed", "1"], &SMALL]);
    ran.fails(1, "NonFinite");
    // What the steps have made is kept when it cannot be decoded.
    assert_eq!(names(out.path()), ["a-latents.safetensors"]);
    assert!(ran.stderr.contains("a-latents.safetensors"), "{}", ran.stderr);
    imagine(&[
        &[text(copy.path()), "-o", text(&file), "--save-latents", text(&latents)],
        &SMALL,
    ])
    .fails(1, "NonFinite");
    assert_eq!(names(out.path()), ["a-latents.safetensors", "l.safetensors"]);
}

/// A configuration that describes fewer layers than the file has makes another picture.
#[test]
fn tensors_that_no_network_uses_are_named() {
    let copy = tempfile::tempdir().unwrap();
    copy_dir(&dir(), copy.path());
    let config = copy.path().join("transformer/config.json");
    let plain = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, plain.replace("\"num_layers\": 3", "\"num_layers\": 2")).unwrap();
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("a.png");
    let notes = |model: &Path| imagine(&[&[text(model), "-o", text(&file), "--seed", "1"], &SMALL]).stderr;
    let note = notes(copy.path());
    assert!(
        note.contains("tensors of the file are not used, such as 'dit.layers.2."),
        "{note}"
    );
    assert!(!notes(&dir()).contains("are not used"));
}

#[cfg(unix)]
#[test]
fn an_interrupted_picture_keeps_its_last_preview() {
    let out = tempfile::tempdir().unwrap();
    let (model, file): (PathBuf, PathBuf) = (container(F16), out.path().join("a.png"));
    let mut command = program();
    command.args([
        "imagine",
        text(&model),
        "-p",
        "a fox",
        "-o",
        text(&file),
        "--steps",
        "1000",
        "--device",
        "cpu",
        "--json",
    ]);
    command.args(["-W", "32", "-H", "32", "--cfg", "1", "--preview-every", "1"]);
    let latents = out.path().join("a.safetensors");
    command.args(["--save-latents", text(&latents)]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let preview = out.path().join("a-preview.png");
    let start = Instant::now();
    while !preview.exists() {
        assert!(start.elapsed() < Duration::from_secs(120));
        std::thread::sleep(Duration::from_millis(20));
    }
    let killed = std::process::Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(killed.success());
    let ran = Ran::of(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(130), "{}", ran.stderr);
    assert!(ran.stderr.contains("a-preview.png"), "{}", ran.stderr);
    let object: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(
        (&object["finish"], &object["images"], &object["latents"]),
        (&json!("interrupted"), &json!([]), &json!([]))
    );
    assert_eq!(object["preview"], text(&preview));
    assert_eq!(picture(&preview).size, (32, 32));
    assert_eq!(names(out.path()), ["a-preview.png"]);
}
