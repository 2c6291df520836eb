//! Converts errors of wgpu to errors of this library.

use crate::error::{Error, Kind, Result};

/// Open error scopes, which catch out-of-memory, validation and internal errors of this thread.
pub struct Scope {
    guards: Vec<wgpu::ErrorScopeGuard>,
}

impl Scope {
    /// Opens the scopes.
    pub fn open(device: &wgpu::Device) -> Scope {
        let filters = [
            wgpu::ErrorFilter::Internal,
            wgpu::ErrorFilter::OutOfMemory,
            wgpu::ErrorFilter::Validation,
        ];
        Scope {
            guards: filters.map(|filter| device.push_error_scope(filter)).into(),
        }
    }

    /// Closes the scopes. Errors: the first error that was caught.
    pub fn finish(mut self) -> Result<()> {
        let mut caught = None;
        while let Some(guard) = self.guards.pop() {
            caught = caught.or(pollster::block_on(guard.pop()));
        }
        match caught {
            Some(err) => Err(device_error(&err)),
            None => Ok(()),
        }
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        // wgpu requires that scopes are closed in reverse order.
        while self.guards.pop().is_some() {}
    }
}

/// The error of this library for an error of wgpu.
pub fn device_error(err: &wgpu::Error) -> Error {
    match err {
        wgpu::Error::OutOfMemory { .. } => Error::new(
            Kind::OutOfMemory,
            "the device has no memory left; a shorter context or weights of fewer bits would help",
        ),
        wgpu::Error::Validation { description, .. } | wgpu::Error::Internal { description, .. } => {
            let lines = description.lines().map(str::trim).filter(|line| !line.is_empty());
            Error::new(Kind::DeviceError, lines.take(6).collect::<Vec<_>>().join("; "))
        }
    }
}
