//! Flags that choose skills, and the choice of skills by the prompt.

use super::context::usage;
use super::output::Output;
use clap::Args;
use cmf_gpu::engine::{Route, incomparable, routable};
use cmf_gpu::options::{Overlay, TaskChoice};
use cmf_gpu::source::{ModelSource, NO_TASK};
use cmf_gpu::{Cancel, Engine, LoadOptions, Result, routing};

/// The temperature of a blend that the prompt decides.
const TEMPERATURE: f64 = 0.1;

/// The help of `--skill` in commands without a prompt.
pub const SKILL_HELP: &str = "The active skill: its id, or none";
/// The help of `--blend` in commands without a prompt.
pub const BLEND_HELP: &str = "Several skills with weights that add up to 1, as in a:0.25,b:0.75";

/// Which skills are active.
#[derive(Args)]
pub struct OverlayArgs {
    /// The active skill: its id, none, or auto = the skill whose examples are most like the prompt
    #[arg(long, value_name = "ID", default_value = "none")]
    skill: String,
    /// Several skills with weights that add up to 1, as in a:0.25,b:0.75; auto or auto:T takes all skills, each with the
    /// weight softmax(-E/T) for the prompt, by default with T = 0.1
    #[arg(long, value_name = "ID:W,ID:W", value_parser = blend, conflicts_with = "skill")]
    blend: Option<SkillChoice>,
}

/// The skills that the flags choose.
#[derive(Clone, Debug, PartialEq)]
pub enum SkillChoice {
    /// Chosen by the flags.
    Fixed(Overlay),
    /// The skill that fits the prompt best.
    Routed,
    /// All skills, weighted by how well they fit the prompt, with this temperature.
    RoutedBlend(f64),
}

fn blend(text: &str) -> Result<SkillChoice, String> {
    let temperature = match text.strip_prefix("auto") {
        Some("") => TEMPERATURE,
        Some(rest) if rest.starts_with(':') => match rest[1..].parse::<f64>() {
            Ok(temperature) if temperature.is_finite() && temperature > 0.0 => temperature,
            _ => return Err(format!("expected auto:T with T above 0, found '{text}'")),
        },
        _ => {
            let overlay = Overlay::blend(text).map_err(|err| err.message)?;
            return Ok(SkillChoice::Fixed(overlay));
        }
    };
    Ok(SkillChoice::RoutedBlend(temperature))
}

impl OverlayArgs {
    /// The choice. Errors: `Usage` when the prompt decides among skills that have no examples.
    pub fn choice(&self, source: &ModelSource) -> Result<SkillChoice> {
        let choice = self.given();
        if choice.needs_prompt() {
            routable(source)?;
        }
        Ok(choice)
    }

    fn given(&self) -> SkillChoice {
        match (&self.blend, self.skill.as_str()) {
            (Some(blend), _) => blend.clone(),
            (None, "none") => SkillChoice::Fixed(Overlay::Backbone),
            (None, "auto") => SkillChoice::Routed,
            (None, id) => SkillChoice::Fixed(Overlay::Skill(id.into())),
        }
    }

    /// The choice of a command that has no prompt. Errors: `Usage` when the prompt decides.
    pub fn fixed(&self) -> Result<Overlay> {
        match self.given() {
            SkillChoice::Fixed(overlay) => Ok(overlay),
            _ => Err(usage("auto needs a prompt, and this command has none")),
        }
    }
}

impl SkillChoice {
    /// Whether the prompt decides.
    pub fn needs_prompt(&self) -> bool {
        !matches!(self, SkillChoice::Fixed(_))
    }

    /// The options to load with. If the prompt decides: the backbone, and without a mask unless a task was named, so that
    /// loading prints no notice about a choice that is still open.
    pub fn first(&self, options: LoadOptions) -> LoadOptions {
        match self {
            SkillChoice::Fixed(overlay) => options.overlay(overlay.clone()),
            _ if options.task == TaskChoice::Default => options.task(TaskChoice::Full),
            _ => options,
        }
    }

    /// Chooses skills by the prompt if the flags ask for it; `task` is the task of the flags. Errors: those of routing and
    /// of changing skills.
    pub fn settle(
        &self,
        engine: &mut Engine,
        task: &TaskChoice,
        prompt: &[u32],
        cancel: &Cancel,
        out: &Output,
    ) -> Result<()> {
        if !self.needs_prompt() {
            return Ok(());
        }
        let routes = engine.route(prompt, cancel)?;
        note_incomparable(&routes, out);
        let overlay = match (self, routes.first()) {
            (SkillChoice::RoutedBlend(temperature), _) => Overlay::Blend(weighted(&routes, *temperature)?),
            (_, Some(best)) => Overlay::Skill(best.id.clone()),
            (_, None) => return Err(usage("no skill of the file has examples")),
        };
        let before = engine.task().map(str::to_owned);
        out.notices(&engine.choose(&overlay, task)?);
        announce(engine, out);
        if engine.task() != before.as_deref() {
            out.note(describe_task(engine));
        }
        Ok(())
    }
}

fn weighted(routes: &[Route], temperature: f64) -> Result<Vec<(String, f32)>> {
    let energies: Vec<f64> = routes.iter().map(|route| route.energy).collect();
    let weights = routing::weights(&energies, temperature)?;
    let ids = routes.iter().map(|route| route.id.clone());
    Ok(ids.zip(weights.iter().map(|&weight| weight as f32)).collect())
}

/// Prints a note if the energies of `routes` come from different layers.
pub fn note_incomparable(routes: &[Route], out: &Output) {
    let layers = routes.iter().map(|route| (route.id.as_str(), route.phi_layer));
    out.notices(&incomparable(layers));
}

/// The active task in words.
pub fn describe_task(engine: &Engine) -> String {
    format!("task {}", engine.task().unwrap_or(NO_TASK))
}

/// Prints the active skills, if any.
pub fn announce(engine: &Engine, out: &Output) {
    if *engine.overlay() != Overlay::Backbone {
        out.note(describe_skills(engine));
    }
}

/// The active skills in words.
pub fn describe_skills(engine: &Engine) -> String {
    match engine.overlay() {
        Overlay::Skill(id) => {
            let (source, task) = (engine.source(), engine.task().unwrap_or(NO_TASK));
            let skill = source.skills.iter().find(|skill| skill.id == *id);
            match skill.and_then(|skill| skill.measured_task(source.masks())) {
                Some(measured) if measured == task => format!("skill {id}"),
                Some(other) => format!("skill {id}; its quality was measured with the task {other}, not with {task}"),
                None => format!("skill {id}; its quality was not measured"),
            }
        }
        Overlay::Blend(weights) => {
            let weights = weights.iter().map(|(id, weight)| format!("{id}:{weight:.3}"));
            format!("skills {}", weights.collect::<Vec<_>>().join(","))
        }
        _ => "skill none".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blends_are_given_or_left_to_the_prompt() {
        assert_eq!(blend("auto"), Ok(SkillChoice::RoutedBlend(TEMPERATURE)));
        assert_eq!(blend("auto:0.5"), Ok(SkillChoice::RoutedBlend(0.5)));
        let expected = Overlay::Blend(vec![("a".into(), 0.25), ("auto2".into(), 0.75)]);
        assert_eq!(blend("a:0.25,auto2:0.75"), Ok(SkillChoice::Fixed(expected)));
        for bad in ["auto:", "auto:0", "auto:-1", "auto:nan", "a"] {
            assert!(blend(bad).is_err(), "{bad}");
        }
    }
}
