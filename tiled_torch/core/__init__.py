"""What every capability stands on, on one device."""
