"""Decisions that need no HTTP and no tensors: conversion, ordering, types."""
