//! Flags that choose skills, and what a prompt makes of them.

use super::args::chosen;
use super::output::Output;
use super::{Context, Result, usage};
use clap::Args;
use cmf_gpu::container::{Container, NO_TASK};
use cmf_gpu::engine::{Engine, Route, incomparable, routable};
use cmf_gpu::options::{LoadOptions, Overlay, TaskChoice};
use cmf_gpu::routing;
use cmf_gpu::session::Cancel;

/// The temperature of weights that a prompt decides.
const TEMPERATURE: f64 = 0.1;

/// What `--help` says of `--skill` where no prompt decides.
pub const SKILL_HELP: &str = "The skill that is active: its id, or none";
/// What `--help` says of `--blend` where no prompt decides.
pub const BLEND_HELP: &str = "Several skills, their tensors added up with weights that make 1, as in a:0.25,b:0.75";

/// Which skills are active.
#[derive(Args)]
pub struct OverlayArgs {
    /// The skill that is active: its id, none, or auto = the one that the prompt is most like the examples of
    #[arg(
        long,
        env = "CMF_GPU_SKILL",
        value_name = "ID",
        default_value = "none",
        hide_env = true
    )]
    skill: String,
    /// Several skills, their tensors added up with weights that make 1, as in a:0.25,b:0.75; auto or auto:T takes all skills,
    /// each with softmax(-E/T) for the prompt, T being 0.1 if it is not given
    #[arg(long, env = "CMF_GPU_BLEND", value_name = "ID:W,ID:W", value_parser = blend, hide_env = true)]
    blend: Option<Wanted>,
}

/// What the flags ask for.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// Known without a prompt.
    Now(Overlay),
    /// The skill that the prompt is for.
    Routed,
    /// All skills by how well they fit the prompt, with this temperature.
    RoutedBlend(f64),
}

fn blend(text: &str) -> std::result::Result<Wanted, String> {
    let temperature = match text.strip_prefix("auto") {
        Some("") => TEMPERATURE,
        Some(rest) if rest.starts_with(':') => match rest[1..].parse::<f64>() {
            Ok(temperature) if temperature.is_finite() && temperature > 0.0 => temperature,
            _ => return Err(format!("wanted auto:T with T above 0, found '{text}'")),
        },
        _ => return Overlay::blend(text).map(Wanted::Now).map_err(|err| err.message),
    };
    Ok(Wanted::RoutedBlend(temperature))
}

impl OverlayArgs {
    /// What is asked for. Errors: `Usage` when both flags are given, and when a prompt is to choose among skills that do not say
    /// what their prompts are like.
    pub fn wanted(&self, container: &Container, context: &Context) -> Result<Wanted> {
        let wanted = self.given(context)?;
        if !matches!(wanted, Wanted::Now(_)) {
            routable(container)?;
        }
        Ok(wanted)
    }

    fn given(&self, context: &Context) -> Result<Wanted> {
        Ok(match (chosen(&context.matches, &["skill", "blend"])?, &self.blend) {
            (Some("blend"), Some(blend)) => blend.clone(),
            _ => match self.skill.as_str() {
                "none" => Wanted::Now(Overlay::Backbone),
                "auto" => Wanted::Routed,
                id => Wanted::Now(Overlay::Skill(id.into())),
            },
        })
    }

    /// What is asked for, of a command that has no prompt. Errors: `Usage` when a prompt would have to decide.
    pub fn fixed(&self, context: &Context) -> Result<Overlay> {
        match self.given(context)? {
            Wanted::Now(overlay) => Ok(overlay),
            Wanted::Routed | Wanted::RoutedBlend(_) => Err(usage("auto needs a prompt that decides, and here is none")),
        }
    }
}

impl Wanted {
    /// The options to load with. Where the prompt decides, the backbone and, unless a task was named, no mask: so nothing is said
    /// about a choice that is not made yet.
    pub fn first(&self, options: LoadOptions) -> LoadOptions {
        let (overlay, open_task) = match self {
            Wanted::Now(overlay) => (overlay.clone(), TaskChoice::Default),
            Wanted::Routed | Wanted::RoutedBlend(_) => (Overlay::Backbone, TaskChoice::Full),
        };
        LoadOptions {
            overlay,
            task: match options.task {
                TaskChoice::Default => open_task,
                chosen => chosen,
            },
            ..options
        }
    }

    /// Lets the prompt decide, where it is to; `task` is what the caller chose. Errors: those of routing and of changing
    /// skills.
    pub fn settle(
        &self,
        engine: &mut Engine,
        task: &TaskChoice,
        prompt: &[u32],
        cancel: &Cancel,
        out: &Output,
    ) -> Result<()> {
        if matches!(self, Wanted::Now(_)) {
            return Ok(());
        }
        let routes = engine.route(prompt, cancel)?;
        note_incomparable(&routes, out);
        let overlay = match (self, routes.first()) {
            (Wanted::RoutedBlend(temperature), _) => Overlay::Blend(weighted(&routes, *temperature)?),
            (_, Some(best)) => Overlay::Skill(best.id.clone()),
            (_, None) => return Err(usage("no skill says which prompts are for it")),
        };
        let before = engine.task().map(str::to_owned);
        if let Some(notice) = engine.choose(&overlay, task)? {
            out.note(format!("note: {notice}"));
        }
        announce(engine, out);
        if engine.task() != before.as_deref() {
            out.note(shown_task(engine));
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

/// Says where energies should not be compared.
pub fn note_incomparable(routes: &[Route], out: &Output) {
    let layers = routes.iter().map(|route| (route.id.as_str(), route.phi_layer));
    if let Some(notice) = incomparable(layers) {
        out.note(format!("note: {notice}"));
    }
}

/// Whose mask is in force.
pub fn shown_task(engine: &Engine) -> String {
    format!("task {}", engine.task().unwrap_or(NO_TASK))
}

/// Says which skills are active, if any.
pub fn announce(engine: &Engine, out: &Output) {
    if *engine.overlay() != Overlay::Backbone {
        out.note(shown(engine));
    }
}

/// Which skills are active.
pub fn shown(engine: &Engine) -> String {
    match engine.overlay() {
        Overlay::Backbone => "skill none".into(),
        Overlay::Skill(id) => {
            let container = engine.container();
            let skill = container.skills().iter().find(|skill| skill.id == *id);
            let task = engine.task().unwrap_or(NO_TASK);
            match skill.and_then(|skill| skill.measured_task(container.masks())) {
                Some(measured) if measured == task => format!("skill {id}"),
                Some(other) => format!(
                    "skill {id}; how good the model is with it was not measured under the task {task}, only under {other}"
                ),
                None => format!("skill {id}; how good the model is with it was not measured"),
            }
        }
        Overlay::Blend(weights) => {
            let parts: Vec<String> = weights.iter().map(|(id, weight)| format!("{id}:{weight:.3}")).collect();
            format!("skills {}", parts.join(","))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blends_are_given_or_left_to_the_prompt() {
        assert_eq!(blend("auto"), Ok(Wanted::RoutedBlend(TEMPERATURE)));
        assert_eq!(blend("auto:0.5"), Ok(Wanted::RoutedBlend(0.5)));
        let wanted = Overlay::Blend(vec![("a".into(), 0.25), ("auto2".into(), 0.75)]);
        assert_eq!(blend("a:0.25,auto2:0.75"), Ok(Wanted::Now(wanted)));
        for bad in ["auto:", "auto:0", "auto:-1", "auto:nan", "a"] {
            assert!(blend(bad).is_err(), "{bad}");
        }
    }
}
