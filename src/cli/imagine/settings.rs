//! The settings of a picture as text, in the form that other programs read from PNG files: the prompt, the negative prompt, and
//! a line of names and values.

use cmf_gpu::source::ModelSource;

/// What made a picture.
pub struct Settings<'a> {
    pub prompt: &'a str,
    pub negative: &'a str,
    pub steps: u32,
    pub guidance: f32,
    /// `None`: the noise came from a file.
    pub seed: Option<u64>,
    pub width: u32,
    pub height: u32,
    pub shift: f64,
    /// The name of the model, and a hash of its weights if the file has one.
    pub model: &'a (String, Option<String>),
}

impl Settings<'_> {
    pub fn text(&self) -> String {
        let mut text = self.prompt.to_owned();
        if !self.negative.is_empty() {
            text.push_str("\nNegative prompt: ");
            text.push_str(self.negative);
        }
        let (name, hash) = self.model;
        let (width, height) = (self.width, self.height);
        let values = [
            ("Steps", Some(self.steps.to_string())),
            ("Sampler", Some("Euler".into())),
            ("Schedule type", Some("Flow match".into())),
            ("CFG scale", Some(self.guidance.to_string())),
            ("Seed", self.seed.map(|seed| seed.to_string())),
            ("Size", Some(format!("{width}x{height}"))),
            ("Model hash", hash.clone()),
            ("Model", Some(name.clone())),
            ("Shift", Some(self.shift.to_string())),
            ("Version", Some(concat!("cmf-gpu ", env!("CARGO_PKG_VERSION")).into())),
        ];
        let values = values
            .into_iter()
            .filter_map(|(name, value)| Some(format!("{name}: {}", quoted(value?))));
        format!("{text}\n{}", values.collect::<Vec<_>>().join(", "))
    }
}

/// A value that the separators of the list do not end early.
fn quoted(value: String) -> String {
    match value.contains([',', ':', '\n']) {
        true => serde_json::Value::from(value).to_string(),
        false => value,
    }
}

/// The name of a model, and the first digits of a hash of its weights if the file has one.
pub fn model_name(source: &ModelSource, path: &std::path::Path) -> (String, Option<String>) {
    let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let hash = source
        .cmf
        .as_ref()
        .and_then(|container| container.directory_hash().ok());
    let hash = hash.map(|hash| format!("{hash:016x}")[..10].to_owned());
    (name.unwrap_or_default(), hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_separated_by_commas() {
        let model = ("a, b".to_owned(), Some("0123456789".to_owned()));
        let settings = Settings {
            prompt: "a fox,\nin snow",
            negative: "",
            steps: 8,
            guidance: 4.5,
            seed: Some(7),
            width: 64,
            height: 128,
            shift: 6.0,
            model: &model,
        };
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(
            settings.text(),
            format!(
                "a fox,\nin snow\nSteps: 8, Sampler: Euler, Schedule type: Flow match, CFG scale: 4.5, Seed: 7, Size: 64x128, \
                 Model hash: 0123456789, Model: \"a, b\", Shift: 6, Version: cmf-gpu {version}"
            )
        );
        let settings = Settings {
            negative: "blurry",
            seed: None,
            ..settings
        };
        assert!(
            settings
                .text()
                .starts_with("a fox,\nin snow\nNegative prompt: blurry\nSteps: 8, ")
        );
        assert!(!settings.text().contains("Seed"));
    }
}
