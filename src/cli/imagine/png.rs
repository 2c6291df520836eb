//! PNG files with the settings that made the picture.

use cmf_gpu::image::Image;
use png::{BitDepth, ColorType, Encoder, EncodingError};
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

/// The keyword under which other programs look for settings.
const KEYWORD: &str = "parameters";

/// Writes a picture. Errors: those of the file.
pub fn write(path: &Path, image: &Image, settings: Option<&str>) -> Result<(), EncodingError> {
    let mut encoder = Encoder::new(BufWriter::new(File::create(path)?), image.width, image.height);
    encoder.set_color(ColorType::Rgb);
    encoder.set_depth(BitDepth::Eight);
    if let Some(settings) = settings {
        // A tEXt chunk holds Latin-1 only; programs that read it also read iTXt, which holds everything.
        match settings.chars().all(|c| u32::from(c) < 256) {
            true => encoder.add_text_chunk(KEYWORD.into(), settings.into())?,
            false => encoder.add_itxt_chunk(KEYWORD.into(), settings.into())?,
        }
    }
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&image.rgb)?;
    writer.finish()
}
