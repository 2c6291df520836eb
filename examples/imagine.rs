//! Makes a picture and writes it as a PPM file: `cargo run --release --example imagine MODEL "a fox in the snow" fox.ppm`.

use cmf_gpu::{Cancel, ImageEvent, ImagePipeline, ImageRequest, LoadOptions, source};
use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, prompt, out] = arguments.as_slice() else {
        return Err("expected a model, a prompt and a file to write".into());
    };
    let source = source::open(Path::new(model))?;
    let mut pipeline = ImagePipeline::load(&source, &LoadOptions::default())?;
    let request = ImageRequest {
        prompt: prompt.clone(),
        steps: 20,
        seed: 7,
        ..ImageRequest::default()
    };
    // Another thread may call `cancel.cancel()`.
    let cancel = Cancel::new();
    let made = pipeline.generate(&request, &cancel, &mut |event| {
        if let ImageEvent::Step { done, total } = event {
            eprintln!("step {done} of {total}");
        }
        Ok(())
    })?;
    let header = format!("P6\n{} {}\n255\n", made.image.width, made.image.height);
    std::fs::write(out, [header.as_bytes(), &made.image.rgb].concat())?;
    Ok(())
}
