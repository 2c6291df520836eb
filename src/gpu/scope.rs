//! Converts errors of wgpu to errors of this library.

use crate::error::{Error, Result, error};

/// Open error scopes, which catch out-of-memory, validation and internal errors of this thread.
pub struct Scope {
    /// In the order in which wgpu requires that they are closed: the last one that was opened comes first.
    guards: [wgpu::ErrorScopeGuard; 3],
}

impl Scope {
    pub fn open(device: &wgpu::Device) -> Scope {
        let filters = [
            wgpu::ErrorFilter::Internal,
            wgpu::ErrorFilter::OutOfMemory,
            wgpu::ErrorFilter::Validation,
        ];
        let mut guards = filters.map(|filter| device.push_error_scope(filter));
        guards.reverse();
        Scope { guards }
    }

    /// Closes the scopes. Errors: the first error that was caught.
    pub fn finish(self) -> Result<()> {
        let caught = self.guards.map(|guard| pollster::block_on(guard.pop()));
        match caught.into_iter().flatten().next() {
            Some(err) => Err(device_error(&err)),
            None => Ok(()),
        }
    }
}

/// The error of this library for an error of wgpu.
pub fn device_error(err: &wgpu::Error) -> Error {
    match err {
        wgpu::Error::OutOfMemory { .. } => error!(
            OutOfMemory,
            "the device has no memory left; a shorter context or weights of fewer bits would help",
        ),
        wgpu::Error::Validation { description, .. } | wgpu::Error::Internal { description, .. } => {
            let lines = description.lines().map(str::trim).filter(|line| !line.is_empty());
            error!(DeviceError, "{}", lines.take(6).collect::<Vec<_>>().join("; "))
        }
    }
}
