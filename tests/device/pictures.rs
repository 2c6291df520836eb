//! Pictures of the golden pipeline, as diffusers makes them: latents after the last step, and pixels.

use crate::golden::pipeline::{F16, REFERENCE_Q4T, container, dir, fixture};
use cmf_gpu::engine::{ImageEvent, ImagePipeline};
use cmf_gpu::image::{Image, ImageRequest, Latents};
use cmf_gpu::options::DeviceChoice;
use cmf_gpu::{Cancel, Kind, LoadOptions, source};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::Path;

fn load(path: &Path, options: LoadOptions) -> ImagePipeline {
    ImagePipeline::load(&source::open(path).unwrap(), &options).unwrap()
}

/// The recorded cases: name and request.
fn cases() -> Vec<(String, ImageRequest)> {
    let json = std::fs::read(fixture().join("cases.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_slice(&json).unwrap();
    let number = |case: &Value, key: &str| case[key].as_f64();
    let request = |case: &Value| {
        let mut request = ImageRequest {
            prompt: case["prompt"].as_str().unwrap().into(),
            negative: case["negative_prompt"].as_str().unwrap_or_default().into(),
            width: Some(number(case, "width").unwrap() as u32),
            height: Some(number(case, "height").unwrap() as u32),
            steps: number(case, "steps").unwrap() as u32,
            guidance: number(case, "guidance_scale").unwrap() as f32,
            normalise: case["cfg_normalization"] != false,
            guide_until: number(case, "cfg_trunc_ratio").unwrap_or(1.0) as f32,
            seed: case["latent_seed"].as_u64().unwrap(),
            ..ImageRequest::default()
        };
        if let Some(system) = case["system_prompt"].as_str() {
            request.system = system.into();
        }
        (case["name"].as_str().unwrap().to_owned(), request)
    };
    cases.iter().map(request).collect()
}

/// The picture, and the latents after the last step.
fn made(pipeline: &mut ImagePipeline, request: &ImageRequest) -> (Image, Latents) {
    let mut last = None;
    let made = pipeline.generate(request, &Cancel::new(), &mut |event| {
        if let ImageEvent::Latents(latents) = event {
            last = Some(latents.clone());
        }
        Ok(())
    });
    (made.unwrap().image, last.unwrap())
}

fn recorded(name: &str) -> (Vec<u8>, Vec<f32>) {
    let file = std::fs::File::open(fixture().join(format!("{name}.png"))).unwrap();
    let mut reader = png::Decoder::new(std::io::BufReader::new(file)).read_info().unwrap();
    let mut rgb = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut rgb).unwrap();
    let bytes = std::fs::read(fixture().join("latents.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let latents = tensors.tensor(name).unwrap().data().to_vec();
    let values = latents.as_chunks().0.iter();
    (rgb, values.map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// The largest difference.
fn most<T: Copy>(a: &[T], b: &[T], difference: impl Fn(T, T) -> f32) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(&a, &b)| difference(a, b)).fold(0.0, f32::max)
}

fn pixels(a: u8, b: u8) -> f32 {
    a.abs_diff(b).into()
}

/// Every case from `path` is the recorded one. `steps`: the largest difference of pixels, of 255.
fn are_recorded(path: &Path, kind: &str, steps: f32) {
    for device in [DeviceChoice::Auto, DeviceChoice::Cpu] {
        let mut pipeline = load(path, LoadOptions::default().device(device.clone()));
        for (name, request) in cases() {
            let (image, latents) = made(&mut pipeline, &request);
            let (rgb, values) = recorded(&format!("{name}.{kind}"));
            let off = most(&latents.values, &values, |a, b| (a - b).abs());
            assert!(off <= 5e-4, "{name} on {device:?}: latents differ by {off}");
            let off = most(&image.rgb, &rgb, pixels);
            assert!(off <= steps, "{name} on {device:?}: pixels differ by {off}");
            let others = image.rgb.iter().zip(&rgb).filter(|(a, b)| a != b).count();
            assert!(
                others <= rgb.len() / 500,
                "{name} on {device:?}: {others} values differ"
            );
        }
    }
}

#[test]
fn a_diffusers_directory_makes_the_recorded_pictures() {
    are_recorded(&dir(), "f16", 1.0);
}

#[test]
fn a_container_makes_the_recorded_pictures() {
    are_recorded(&container(F16), "f16", 1.0);
}

#[test]
fn quantised_weights_make_the_pictures_of_their_values() {
    are_recorded(&container(REFERENCE_Q4T), "reference-q4t", 1.0);
}

/// Networks that leave the device for each other, and a decoder in strips, change nothing that can be seen.
#[test]
fn pictures_do_not_depend_on_the_memory() {
    let (_, request) = cases().swap_remove(0);
    let options = |mib: Option<u64>| LoadOptions::default().vram_mb(mib);
    let mut pipeline = load(&container(F16), options(None));
    let (whole, latents) = made(&mut pipeline, &request);
    let used = |pipeline: &ImagePipeline| {
        let report = pipeline.device_report();
        report.weight_bytes + report.buffer_bytes
    };
    let all = (used(&pipeline) >> 20) + 1;
    let (mut least, mut made_in) = (None, 0);
    for mib in 1..=all {
        let mut pipeline = load(&container(F16), options(Some(mib)));
        match pipeline.check(&request) {
            Ok(_) => {}
            Err(err) => {
                assert_eq!(err.kind, Kind::OutOfMemory);
                assert!(
                    err.message.contains("needs") && err.message.contains("available are"),
                    "{err}"
                );
                least = Some(mib);
                continue;
            }
        }
        let (image, same) = made(&mut pipeline, &request);
        assert!(used(&pipeline) <= mib << 20, "{mib} MiB");
        assert_eq!(same, latents, "{mib} MiB");
        let off = most(&image.rgb, &whole.rgb, pixels);
        assert!(off <= 1.0, "{mib} MiB: pixels differ by {off}");
        made_in += 1;
    }
    assert!(least.is_some() && made_in >= 2, "{least:?} of {all}, {made_in}");
}
