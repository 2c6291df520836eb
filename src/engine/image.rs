//! Pictures from texts: the networks of a pipeline on a device.
//!
//! Text encoder, denoiser and decoder are separate graphs. They stay on the device together if the memory allows it; else each
//! makes room for the next.

use super::device::open_device;
use super::loaded::DeviceReport;
use crate::budget::available_memory;
use crate::error::{Kind, Result, bail};
use crate::gpu::{Device, GpuExecutor, MAX_BINDING};
use crate::graph::{Executor, Graph, Selection};
use crate::host::HostExecutor;
use crate::image::config::Config;
use crate::image::grid::{Grid, LATENT_PIXELS, check_caption};
use crate::image::lower::{self, DitPlan, TextPlan, VaePlan};
use crate::image::run::{Branch, Decoder, Denoiser, Encoder};
use crate::image::sampler::{self, Guidance};
use crate::image::{self, Image, ImageRequest, ImageTensors, Latents, Network};
use crate::lm::run::Cancel;
use crate::notice::Notice;
use crate::options::LoadOptions;
use crate::source::{ModelSource, Tensors};
use crate::text::Tokenizer;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Most tokens of a prompt; longer ones are cut, as diffusers does.
const PROMPT_TOKENS: usize = 256;

/// Between the system prompt and the prompt.
const PROMPT_START: &str = " <Prompt Start> ";

/// Strips of the decoder are halved down to this many bytes.
const LEAST_STRIP: u64 = 1 << 16;

/// What happens while a picture is made.
pub enum ImageEvent<'a> {
    /// A step is done.
    Step {
        /// Steps done.
        done: u32,
        /// All steps.
        total: u32,
    },
    /// The picture that the denoiser expects after this step.
    Preview(Image),
    /// The result of the last step, before it is decoded.
    Latents(&'a Latents),
}

/// Receives events. An error ends the work.
pub type OnEvent<'a> = &'a mut dyn FnMut(ImageEvent) -> Result<()>;

/// A picture and how long its stages took.
#[derive(Clone, Debug, PartialEq)]
pub struct Made {
    /// The picture.
    pub image: Image,
    /// Shift of the noise levels; of a schedule whose shift depends on the length, that for no length.
    pub shift: f64,
    /// Seconds of the stages text, denoise and decode.
    pub seconds: BTreeMap<&'static str, f64>,
}

/// A part of the pipeline, as graphs are lowered for it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Text,
    Denoise,
    Decode,
}

/// A part on the device.
struct Loaded<T> {
    part: T,
    graph: Arc<Graph>,
}

/// A text-to-image pipeline on a device.
pub struct ImagePipeline {
    config: Config,
    network: Network,
    tensors: Arc<dyn Tensors>,
    tokenizer: Tokenizer,
    device: Option<Arc<Device>>,
    /// Most bytes on the device.
    limit: Option<u64>,
    report: DeviceReport,
    encoder: Option<Loaded<Encoder>>,
    denoiser: Option<Loaded<Denoiser>>,
    decoder: Option<Loaded<Decoder>>,
    /// Features of the texts of the last picture, so that another one of the same texts does not encode them again.
    features: Vec<(String, Vec<f32>)>,
}

/// Everything about a picture that is known before the first step.
struct Planned {
    grid: Grid,
    width: u32,
    height: u32,
    sigmas: Vec<f32>,
    guidance: Guidance,
    /// The texts with and without the prompt; the second only if guidance is used.
    texts: Vec<String>,
    text: TextPlan,
    dit: DitPlan,
    vae: VaePlan,
}

impl ImagePipeline {
    /// Opens a device for a pipeline. Weights are uploaded when they are needed.
    ///
    /// Errors: `UnsupportedModel`, `MissingTensor` and `Parse` for networks that cannot be run; `Tokenizer`; `NoAdapter`,
    /// `DeviceError`.
    pub fn load(source: &ModelSource, options: &LoadOptions) -> Result<ImagePipeline> {
        source.require_image()?;
        let config = Config::of(&*source.tensors)?;
        let network = image::bind(&config, &*source.tensors)?;
        let Some(tokenizer) = source.text.tokenizer_json() else {
            bail!(Tokenizer, "the pipeline has no tokenizer");
        };
        let tokenizer = Tokenizer::from_json(tokenizer)?;
        let (device, notice) = open_device(options)?;
        let layers = config.text.num_layers + config.dit.layers + 2 * config.dit.refiners;
        let mut report = DeviceReport::bare(device.as_deref(), layers, PROMPT_TOKENS as u32);
        report.notices.extend(notice);
        if device.is_none() && options.vram_mb.is_some() {
            report.notices.push(Notice::WeightsNotLimited);
        }
        if let Some(&first) = network.unused.first() {
            report.notices.push(Notice::TensorsUnused {
                count: network.unused.len(),
                first: source.tensors.infos()[first].name.clone(),
            });
        }
        Ok(ImagePipeline {
            tensors: Arc::new(ImageTensors::new(source.tensors.clone(), &network)),
            limit: options.vram_mb.map(|mib| mib.saturating_mul(1 << 20)),
            config,
            network,
            tokenizer,
            device,
            report,
            encoder: None,
            denoiser: None,
            decoder: None,
            features: Vec::new(),
        })
    }

    /// The device, and the memory of the parts that are on it.
    pub fn device_report(&self) -> &DeviceReport {
        &self.report
    }

    /// The configurations of the networks.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Checks a request and plans its memory, without any work on the device. Returns width and height of the picture.
    ///
    /// Errors: `Usage` for sizes, steps, factors and latents that the network does not have; `OutOfMemory` with the needed and the
    /// available size.
    pub fn check(&self, request: &ImageRequest) -> Result<[u32; 2]> {
        self.plan(request).map(|planned| [planned.width, planned.height])
    }

    /// Makes a picture.
    ///
    /// Errors: as [`ImagePipeline::check`]; `NonFinite` if a network computes a value that is not a finite number; `Interrupted`
    /// after a cancellation; those of the device and of `on_event`.
    pub fn generate(&mut self, request: &ImageRequest, cancel: &Cancel, on_event: OnEvent) -> Result<Made> {
        let planned = self.plan(request)?;
        let mut seconds = BTreeMap::new();
        let start = Instant::now();
        self.encode(&planned, cancel)?;
        seconds.insert("text", start.elapsed().as_secs_f64());
        let start = Instant::now();
        let latents = self.denoise(&planned, request, cancel, on_event)?;
        seconds.insert("denoise", start.elapsed().as_secs_f64());
        on_event(ImageEvent::Latents(&latents))?;
        let start = Instant::now();
        let image = self.decode(&planned, &latents.values, cancel)?;
        seconds.insert("decode", start.elapsed().as_secs_f64());
        Ok(Made {
            image,
            shift: request.shift.unwrap_or(self.config.scheduler.shift),
            seconds,
        })
    }

    fn plan(&self, request: &ImageRequest) -> Result<Planned> {
        let [width, height] = self.size(request)?;
        let Config { dit, scheduler, .. } = &self.config;
        let grid = Grid::new(dit, width, height)?;
        let sigmas = sampler::sigmas(scheduler, request.steps as usize, request.shift, dit.channels)?;
        let guidance = Guidance {
            scale: request.guidance,
            normalise: request.normalise,
            until: request.guide_until,
        };
        if !guidance.scale.is_finite() || !(0.0..=1.0).contains(&guidance.until) {
            bail!(
                Usage,
                "guidance {} until {} of the steps, expected a finite number, and 0 to 1",
                guidance.scale,
                guidance.until
            );
        }
        let mut texts = vec![format!("{}{PROMPT_START}{}", request.system, request.prompt)];
        if (0..sigmas.len() - 1).any(|step| guidance.guides(step, sigmas.len() - 1)) {
            texts.push(request.negative.clone());
        }
        let ids = texts.iter().map(|text| self.tokens(text)).collect::<Result<Vec<_>>>()?;
        let longest = ids.iter().map(Vec::len).max().unwrap_or(0);
        let tensors = &*self.tensors;
        let max_binding = self.device.as_ref().map_or(MAX_BINDING, |device| device.max_binding());
        let text = lower::text(&self.network.text, tensors, PROMPT_TOKENS as u32, max_binding)?;
        self.fits("the text encoder", &text.graph)?;
        let sizes = [grid.tokens(), longest.next_multiple_of(8)];
        let plan = lower::dit((dit, &self.network.dit), tensors, sizes, max_binding)?;
        self.fits("the denoiser", &plan.graph)?;
        Ok(Planned {
            vae: self.plan_decoder(grid.latents(dit), max_binding)?,
            dit: plan,
            grid,
            width,
            height,
            sigmas,
            guidance,
            texts,
            text,
        })
    }

    /// The decoder, on the whole image if the memory allows it, else in strips. Errors: `OutOfMemory`.
    fn plan_decoder(&self, latents: [usize; 2], max_binding: u64) -> Result<VaePlan> {
        let lowered = |strip| {
            let (config, vae) = (&self.config.vae, &self.network.vae);
            let plan = lower::vae((config, vae), &*self.tensors, latents, strip, max_binding)?;
            self.fits("the decoder", &plan.graph).map(|()| plan)
        };
        let mut strip = self
            .available()
            .map_or(max_binding, |available| available.min(max_binding));
        let mut planned = lowered(None);
        while strip >= LEAST_STRIP && planned.as_ref().is_err_and(|err| err.kind == Kind::OutOfMemory) {
            strip /= 2;
            planned = lowered(Some(strip));
        }
        planned
    }

    /// Bytes for the parts of the pipeline, as far as that is known: the limit, and free memory where the device uses that of
    /// the host.
    fn available(&self) -> Option<u64> {
        let of_host = self.device.as_ref().is_none_or(|device| device.shares_host_memory());
        let free = available_memory(Path::new("/")).filter(|_| of_host);
        let free = free.map(|free| free.saturating_add(self.resident()));
        [self.limit, free].into_iter().flatten().min()
    }

    /// Errors: `OutOfMemory` for a graph that needs more than that.
    fn fits(&self, what: &str, graph: &Graph) -> Result<()> {
        let need = self.bytes(graph);
        match self.available().filter(|&available| need > available) {
            Some(available) => bail!(
                OutOfMemory,
                "{what} needs {} MiB, available are {} MiB",
                need.div_ceil(1 << 20),
                available >> 20
            ),
            None => Ok(()),
        }
    }

    /// Width and height in pixels. Errors: `Usage` for latents of another shape.
    fn size(&self, request: &ImageRequest) -> Result<[u32; 2]> {
        let trained = u32::try_from(self.config.dit.sample_size * LATENT_PIXELS).unwrap_or(u32::MAX);
        let Some(latents) = &request.latents else {
            return Ok([request.width, request.height].map(|side| side.unwrap_or(trained)));
        };
        let own = [latents.width, latents.height].map(|side| u32::try_from(side * LATENT_PIXELS).unwrap_or(u32::MAX));
        let sides = [request.width.unwrap_or(own[0]), request.height.unwrap_or(own[1])];
        let channels = self.config.dit.channels;
        let values = channels.checked_mul(latents.width * latents.height);
        if sides != own || latents.channels != channels || values != Some(latents.values.len()) {
            bail!(
                Usage,
                "latents [{}, {}, {}] are not those of {channels} channels and {} × {} pixels",
                latents.channels,
                latents.height,
                latents.width,
                sides[0],
                sides[1]
            );
        }
        if latents.values.iter().any(|value| !value.is_finite()) {
            bail!(NonFinite, "a value of the latents to start with is not a finite number");
        }
        Ok(sides)
    }

    /// The tokens of a text, of which the first are used. Errors: `Tokenizer`; `Usage` for more than the network has positions.
    fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.tokenizer.encode(text, true)?;
        ids.truncate(PROMPT_TOKENS);
        let vocabulary = self.config.text.vocab_size;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
            bail!(
                Tokenizer,
                "token {id} of the tokenizer, the text encoder has {vocabulary}"
            );
        }
        check_caption(&self.config.dit, ids.len())?;
        Ok(ids)
    }

    /// Makes the features of the texts. Errors: those of the encoder.
    fn encode(&mut self, planned: &Planned, cancel: &Cancel) -> Result<()> {
        self.features.retain(|(text, _)| planned.texts.contains(text));
        for text in &planned.texts {
            if self.features.iter().any(|(known, _)| known == text) {
                continue;
            }
            let ids = self.tokens(text)?;
            if self.encoder.is_none() {
                let executor = self.executor(Stage::Text, &planned.text.graph, cancel)?;
                self.encoder = Some(Loaded {
                    part: Encoder::new(executor, planned.text.clone()),
                    graph: planned.text.graph.clone(),
                });
                self.count();
            }
            let Some(Loaded { part: encoder, .. }) = &mut self.encoder else {
                bail!(Internal, "the text encoder is not loaded");
            };
            let features = encoder.features(&ids, cancel, &mut |_, _| {})?;
            self.features.push((text.clone(), features));
        }
        Ok(())
    }

    /// The denoiser for a picture of this size. Errors: those of loading it.
    fn denoiser(&mut self, planned: &Planned, cancel: &Cancel) -> Result<&mut Denoiser> {
        let (grid, longest) = (planned.grid, planned.dit.caption_tokens);
        if !self
            .denoiser
            .as_ref()
            .is_some_and(|loaded| loaded.part.fits(grid, longest))
        {
            // Of another size only the buffers differ, but both together need memory for both.
            self.denoiser = None;
            let executor = self.executor(Stage::Denoise, &planned.dit.graph, cancel)?;
            self.denoiser = Some(Loaded {
                part: Denoiser::new(executor, planned.dit.clone(), self.config.dit.clone(), grid),
                graph: planned.dit.graph.clone(),
            });
            self.count();
        }
        match &mut self.denoiser {
            Some(loaded) => Ok(&mut loaded.part),
            None => bail!(Internal, "the denoiser is not loaded"),
        }
    }

    /// The latents after the last step.
    fn denoise(
        &mut self,
        planned: &Planned,
        request: &ImageRequest,
        cancel: &Cancel,
        on_event: OnEvent,
    ) -> Result<Latents> {
        let features = std::mem::take(&mut self.features);
        let of = |text: &String| {
            features
                .iter()
                .find(|(known, _)| known == text)
                .map(|(_, values)| values)
        };
        let denoiser = self.denoiser(planned, cancel)?;
        let texts = planned.texts.iter().filter_map(of);
        let branches = texts
            .map(|values| denoiser.branch(values, cancel, None))
            .collect::<Result<Vec<_>>>();
        self.features = features;
        let branches = branches?;
        let Some(with) = branches.first() else {
            bail!(Internal, "a picture without a prompt");
        };
        let [height, width] = planned.grid.latents(&self.config.dit);
        let channels = self.config.dit.channels;
        let mut latents = match &request.latents {
            Some(latents) => latents.values.clone(),
            None => sampler::noise(request.seed, channels * height * width),
        };
        let steps = planned.sigmas.len() - 1;
        for step in 0..steps {
            let levels = [planned.sigmas[step], planned.sigmas[step + 1]];
            let without = branches.get(1).filter(|_| planned.guidance.guides(step, steps));
            let velocity = self.velocity(planned, levels[0], &latents, (with, without), cancel)?;
            let done = step + 1;
            if request
                .preview_every
                .is_some_and(|every| done % every.max(1) as usize == 0)
                && done < steps
            {
                // What is left if the velocity stays the same.
                let mut expected = latents.clone();
                sampler::step(&mut expected, &velocity, [levels[0], 0.0]);
                let preview = self.decode(planned, &expected, cancel)?;
                on_event(ImageEvent::Preview(preview))?;
            }
            sampler::step(&mut latents, &velocity, levels);
            if latents.iter().any(|value| !value.is_finite()) {
                bail!(
                    NonFinite,
                    "the latents after step {done} are not finite numbers everywhere"
                );
            }
            on_event(ImageEvent::Step {
                done: done as u32,
                total: steps as u32,
            })?;
        }
        Ok(Latents {
            channels,
            height,
            width,
            values: latents,
        })
    }

    /// The velocity of latents at a noise level, guided if there is a branch without the prompt.
    fn velocity(
        &mut self,
        planned: &Planned,
        level: f32,
        latents: &[f32],
        (with, without): (&Branch, Option<&Branch>),
        cancel: &Cancel,
    ) -> Result<Vec<f32>> {
        let width = planned.grid.latents(&self.config.dit)[1];
        let denoiser = self.denoiser(planned, cancel)?;
        denoiser.set_time(1.0 - level, cancel, None)?;
        let prompted = denoiser.velocity(latents, with, cancel, None)?;
        let Some(without) = without else {
            return Ok(prompted);
        };
        let unprompted = denoiser.velocity(latents, without, cancel, None)?;
        Ok(planned.guidance.velocity(&prompted, &unprompted, width))
    }

    /// The picture of latents.
    fn decode(&mut self, planned: &Planned, latents: &[f32], cancel: &Cancel) -> Result<Image> {
        let shape = planned.grid.latents(&self.config.dit);
        if !self.decoder.as_ref().is_some_and(|loaded| loaded.part.fits(shape)) {
            self.decoder = None;
            let executor = self.executor(Stage::Decode, &planned.vae.graph, cancel)?;
            self.decoder = Some(Loaded {
                part: Decoder::new(executor, planned.vae.clone(), self.config.vae.clone()),
                graph: planned.vae.graph.clone(),
            });
            self.count();
        }
        let Some(Loaded { part: decoder, .. }) = &mut self.decoder else {
            bail!(Internal, "the decoder is not loaded");
        };
        let values = decoder.decode(latents, cancel, None)?;
        Image::of(&values, planned.width, planned.height)
    }

    /// Uploads the weights of a graph, after making room for them. Errors: those of the device; `Interrupted`.
    fn executor(&mut self, stage: Stage, graph: &Arc<Graph>, cancel: &Cancel) -> Result<Box<dyn Executor>> {
        let (graph, tensors) = (graph.clone(), self.tensors.clone());
        let selection = Arc::<Selection>::default();
        let Some(device) = self.device.clone() else {
            return Ok(Box::new(HostExecutor::new(graph, selection, tensors)?));
        };
        if self
            .available()
            .is_some_and(|available| self.resident() + self.bytes(&graph) > available)
        {
            self.release_others(stage);
        }
        let upload = || {
            let (device, graph, selection, tensors) =
                (device.clone(), graph.clone(), selection.clone(), tensors.clone());
            GpuExecutor::new(
                device,
                graph,
                selection,
                tensors,
                &mut |_, _| match cancel.is_cancelled() {
                    true => bail!(Interrupted, "cancelled"),
                    false => Ok(()),
                },
            )
        };
        // A device does not report how much memory it has.
        let made = match upload() {
            Err(err) if err.kind == Kind::OutOfMemory && self.resident() > 0 => {
                self.release_others(stage);
                upload()
            }
            made => made,
        };
        Ok(Box::new(made?))
    }

    /// The graphs on the device.
    fn graphs(&self) -> impl Iterator<Item = &Arc<Graph>> {
        let parts = [
            self.encoder.as_ref().map(|loaded| &loaded.graph),
            self.denoiser.as_ref().map(|loaded| &loaded.graph),
            self.decoder.as_ref().map(|loaded| &loaded.graph),
        ];
        parts.into_iter().flatten()
    }

    /// Bytes of the parts on the device.
    fn resident(&self) -> u64 {
        self.graphs().map(|graph| self.bytes(graph)).sum()
    }

    /// Bytes of a graph in memory: the weights of the CPU reference stay in the file.
    fn bytes(&self, graph: &Graph) -> u64 {
        let weights = self.device.as_ref().map_or(0, |_| graph.weight_bytes());
        weights.saturating_add(graph.buffer_bytes())
    }

    fn release_others(&mut self, stage: Stage) {
        self.encoder.take_if(|_| stage != Stage::Text);
        self.denoiser.take_if(|_| stage != Stage::Denoise);
        self.decoder.take_if(|_| stage != Stage::Decode);
    }

    /// Counts the memory on the device.
    fn count(&mut self) {
        self.report.weight_bytes = self.graphs().map(|graph| graph.weight_bytes()).sum();
        self.report.buffer_bytes = self.graphs().map(|graph| graph.buffer_bytes()).sum();
    }
}
